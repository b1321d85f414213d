"""The rules by which a recipe is drafted, and the file that comes out."""

import msgspec
import pytest

from coterie.config.data_look import DataLook
from coterie.config.drafting import LONGEST_ROW_TOKENS, check_fit, decide, draft_toml, longest_row_tokens
from coterie.config.guess import guess_task
from coterie.config.loading import load_recipe
from coterie.config.model_look import ModelLook
from coterie.errors import UnsupportedModelError

SMALL = ModelLook(direction="encoder", model_type="bert", width=384, context=512, parameters=22_000_000)
LARGE = ModelLook(direction="decoder", model_type="llama", width=576, context=2048, parameters=135_000_000)
HUGE = msgspec.structs.replace(LARGE, parameters=3_000_000_000)
LABELLED = DataLook(source="d", layout="rows", rows=({"text": "a text", "label": 0}, {"text": "b", "label": 1}))
GIVEN = {"model.name": "m", "data.train": "train.jsonl"}


def chats(length):
    message = {"role": "user", "content": "a" * length}
    return DataLook(source="d", layout="rows", rows=({"messages": [message, message]},))


def drafted(look, model, **given):
    return decide(look, guess_task(look), model, {**GIVEN, **given})


@pytest.mark.parametrize(
    ("model", "method", "rate"),
    [(SMALL, "full", 1e-4), (LARGE, "lora", 5e-4), (HUGE, "lora", 2e-4), (None, "full", 5e-5)],
)
def test_method_and_rate_follow_the_model(model, method, rate):
    values = drafted(LABELLED, model).values
    assert (values["train.method"], values["train.learning_rate"]) == (method, rate)


def test_what_the_user_gave_is_kept_and_the_rate_follows_it():
    values = drafted(LABELLED, SMALL, **{"train.method": "lora", "train.warmup_steps": "5"}).values
    assert (values["train.method"], values["train.learning_rate"]) == ("lora", 5e-4)
    assert values["train.warmup_steps"] == "5"
    assert "train.warmup_ratio" not in values


def test_weights_are_not_quantized_unless_asked():
    assert not any("frozen_dtype" in key for key in drafted(LABELLED, HUGE).values)


def test_long_rows_are_cut_where_the_model_would_take_them():
    long, short = chats(4 * LONGEST_ROW_TOKENS), chats(8)
    assert longest_row_tokens(long, guess_task(long)) == 2 * LONGEST_ROW_TOKENS
    assert drafted(long, LARGE).values["data.max_tokens"] == LONGEST_ROW_TOKENS
    assert "data.max_tokens" not in drafted(short, LARGE).values
    assert "data.max_tokens" not in drafted(long, msgspec.structs.replace(LARGE, context=LONGEST_ROW_TOKENS)).values


def test_a_model_without_a_chat_template_is_mentioned_where_rows_are_chats():
    assert "chat template" in drafted(chats(8), LARGE).comments["data.text_column"]
    chatty = msgspec.structs.replace(LARGE, chat_template=True)
    assert "data.text_column" not in drafted(chats(8), chatty).comments


def test_an_encoder_cannot_write():
    for task in ("causal-lm", "summarization"):
        with pytest.raises(UnsupportedModelError, match="labels texts"):
            check_fit(task, SMALL, "m")
        check_fit(task, LARGE, "m")
        check_fit(task, None, "m")
    check_fit("sequence-classification", LARGE, "m")


def test_the_file_reads_back_to_the_draft_and_says_why(tmp_path):
    workers = ["name=a,memory=600MiB", "name=b"]
    draft = drafted(LABELLED, SMALL, **{"cluster.workers": "3", "cluster.local_workers": workers, "data.dev": 'q"x'})
    recipe = load_recipe(None, draft.values)
    text = draft_toml(recipe, draft, head=("first", ""))
    (tmp_path / "r.toml").write_text(text)
    assert load_recipe(tmp_path / "r.toml") == recipe
    assert text.startswith("# first\n#\n\n[model]\n")
    assert '# labels: 0, 1; label_names = ["…", "…"] would say what they mean\nlabel_column = "label"\n' in text
    assert "epochs" not in text  # a default that nobody decided on
    assert '[[cluster.local_workers]]\nname = "a"\nmemory = "600MiB"\n' in text


def test_every_comment_stands_above_its_key():
    draft = drafted(chats(4000), LARGE)
    text = draft_toml(load_recipe(None, draft.values), draft)
    for key, comment in draft.comments.items():
        if comment:
            first = comment.split()[0]
            lines = text.splitlines()
            where = next(index for index, line in enumerate(lines) if line.startswith(f"{key.partition('.')[2]} = "))
            assert lines[where - 1].startswith("# "), key
            assert first in text
