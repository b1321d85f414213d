import json
from collections.abc import Sequence

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from coterie.errors import DataError, RecipeError, UsageError
from coterie.tasks.causal_lm import CausalLm
from coterie.tasks.collate import collate
from coterie.tasks.data_summary import encode_split
from coterie.tasks.examples import IGNORED_LABEL, EncodedExample, Example
from coterie.tasks.language_rows import Chat, Instruction, Message, SummarizedText, TextDocument
from coterie.tasks.readers.options import ReadOptions
from coterie.tasks.summarization import Summarization
from coterie.tasks.task import DataFiles, Split
from coterie.tasks.tokenizer import LoadedTokenizer


def learnt(encoded: EncodedExample, tokenizer: LoadedTokenizer) -> str:
    """What the labels of a row spell, special tokens written out."""
    labels = encoded.labels[encoded.labels != IGNORED_LABEL]
    return str(tokenizer.hf.decode(labels.tolist()))


def written(encoded: EncodedExample, tokenizer: LoadedTokenizer) -> str:
    return str(tokenizer.hf.decode(encoded.input_ids.tolist()))


def chat(*turns: tuple[str, str]) -> Chat:
    return Chat(messages=tuple(Message(role=role, content=content) for role, content in turns))


def split_of(*examples: Example) -> Split:
    return Split(name="train", source="made", examples=tuple(examples))


TWO_QUESTIONS = chat(("user", "hi"), ("assistant", "yo"), ("user", "bye?"), ("assistant", "ok"))


def test_every_label_is_the_token_that_follows(chat_tokenizer: LoadedTokenizer) -> None:
    for row in (TextDocument(text="some text"), Instruction(text="do", answer="done"), TWO_QUESTIONS):
        encoded = CausalLm().encode(row, chat_tokenizer, 200)
        places = np.flatnonzero(encoded.labels != IGNORED_LABEL)

        assert len(places)
        assert np.array_equal(encoded.labels[places], encoded.input_ids[places + 1])
        assert encoded.labels[-1] == IGNORED_LABEL


def test_of_a_document_everything_is_learnt_and_its_end(base_tokenizer: LoadedTokenizer) -> None:
    encoded = CausalLm().encode(TextDocument(text="abc"), base_tokenizer, 50)

    assert written(encoded, base_tokenizer) == "<s>abc</s>"
    assert learnt(encoded, base_tokenizer) == "abc</s>"


def test_of_an_instruction_only_the_answer_and_its_end_are_learnt(base_tokenizer: LoadedTokenizer) -> None:
    row = Instruction(text="Add.", context="1 2", answer="3")

    encoded = CausalLm().encode(row, base_tokenizer, 200)

    prompt = "<s>### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
    assert written(encoded, base_tokenizer) == f"{prompt}3</s>"
    assert learnt(encoded, base_tokenizer) == "3</s>"


def test_an_instruction_without_input_has_no_input_part(base_tokenizer: LoadedTokenizer) -> None:
    encoded = CausalLm().encode(Instruction(text="Hi", answer="Ho"), base_tokenizer, 200)

    assert written(encoded, base_tokenizer) == "<s>### Instruction:\nHi\n\n### Response:\nHo</s>"


def test_a_prompt_of_ones_own_keeps_other_braces_and_what_stands_in_the_text(base_tokenizer: LoadedTokenizer) -> None:
    task = CausalLm(template='{"q": {text}, "about": {input}} =>')

    encoded = task.encode(Instruction(text="{input}?", context="x", answer="y"), base_tokenizer, 200)

    assert written(encoded, base_tokenizer) == '<s>{"q": {input}?, "about": x} =>y</s>'


def test_a_prompt_without_a_place_for_the_text_is_refused() -> None:
    with pytest.raises(RecipeError, match="no place for the text"):
        CausalLm().prepare(DataFiles(train=[{"text": "a"}], prompt="Say:"))


def test_an_instruction_is_written_by_the_chat_template(chat_tokenizer: LoadedTokenizer) -> None:
    encoded = CausalLm().encode(Instruction(text="Add.", context="1 2", answer="3"), chat_tokenizer, 200)

    assert written(encoded, chat_tokenizer) == (
        "<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    )
    assert learnt(encoded, chat_tokenizer) == "3<|im_end|>"


def test_of_a_chat_every_turn_of_the_assistant_is_learnt_with_its_end(chat_tokenizer: LoadedTokenizer) -> None:
    encoded = CausalLm().encode(TWO_QUESTIONS, chat_tokenizer, 200)

    assert learnt(encoded, chat_tokenizer) == "yo<|im_end|>ok<|im_end|>"


def test_a_chat_has_the_tokens_that_the_tokenizer_gives_it_as_a_whole(chat_tokenizer: LoadedTokenizer) -> None:
    messages = [{"role": turn.role, "content": turn.content} for turn in TWO_QUESTIONS.messages]
    whole = chat_tokenizer.hf.apply_chat_template(messages, return_dict=True)

    encoded = CausalLm().encode(TWO_QUESTIONS, chat_tokenizer, 200)

    assert encoded.input_ids.tolist() == whole["input_ids"]


def test_a_chat_without_a_template_has_turns_with_headings(base_tokenizer: LoadedTokenizer) -> None:
    encoded = CausalLm().encode(chat(("system", "be brief"), ("user", "hi"), ("assistant", "yo")), base_tokenizer, 200)

    assert written(encoded, base_tokenizer) == (
        "<s>### System:\nbe brief\n\n### User:\nhi\n\n### Assistant:\nyo</s>\n\n"
    )
    assert learnt(encoded, base_tokenizer) == "yo</s>"


def test_a_template_that_marks_answers_itself_is_followed(chat_tokenizer: LoadedTokenizer) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% generation %}{{ m['content'] }}<|im_end|>"
        "{% endgeneration %}{% else %}Q:{{ m['content'] }}{% endif %}{% endfor %}"
    )
    marked = with_template(chat_tokenizer, template)

    encoded = CausalLm().encode(TWO_QUESTIONS, marked, 200)

    assert written(encoded, marked) == "Q:hiA:yo<|im_end|>Q:bye?A:ok<|im_end|>"
    assert learnt(encoded, marked) == "yo<|im_end|>ok<|im_end|>"


def with_template(tokenizer: LoadedTokenizer, template: str) -> LoadedTokenizer:
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    hf = tokenizer.hf.__class__(tokenizer_object=tokenizer.hf.backend_tokenizer, chat_template=template, **names)
    return LoadedTokenizer(hf, "other")


def test_a_chat_that_the_template_refuses_is_named(chat_tokenizer: LoadedTokenizer) -> None:
    strict = with_template(chat_tokenizer, "{{ raise_exception('roles must alternate') }}")
    row = Chat(messages=TWO_QUESTIONS.messages, line=7)

    with pytest.raises(DataError, match="line 7: roles must alternate"):
        CausalLm().encode(row, strict, 200)


def test_a_template_that_writes_a_turn_differently_when_more_follows_is_searched_for_the_words(
    chat_tokenizer: LoadedTokenizer,
) -> None:
    """As Qwen3's, which drops the thoughts of earlier turns."""
    thinking = with_template(
        chat_tokenizer,
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
        "{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    messages = [{"role": turn.role, "content": turn.content} for turn in TWO_QUESTIONS.messages]

    encoded = CausalLm().encode(TWO_QUESTIONS, thinking, 200)

    assert encoded.input_ids.tolist() == thinking.hf.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert learnt(encoded, thinking) == "yo<|im_end|>ok<|im_end|>"


def test_a_chat_that_the_assistant_begins_is_learnt_from_its_first_word(chat_tokenizer: LoadedTokenizer) -> None:
    row = chat(("assistant", "hello"), ("user", "hi"), ("assistant", "yo"))
    messages = [{"role": turn.role, "content": turn.content} for turn in row.messages]

    encoded = CausalLm().encode(row, chat_tokenizer, 200)

    assert encoded.input_ids.tolist() == chat_tokenizer.hf.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert learnt(encoded, chat_tokenizer) == "hello<|im_end|>yo<|im_end|>"


@pytest.mark.parametrize("options", [{"prompt": "Q: {text}"}, {"options": ReadOptions(pair_column="input")}])
@pytest.mark.parametrize("row", [{"text": "a"}, {"messages": [{"role": "assistant", "content": "a"}]}])
def test_a_prompt_or_an_input_that_no_row_has_a_place_for_is_refused(row: object, options: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match="is for instructions with answers"):
        CausalLm().prepare(DataFiles(train=[row], **options))


def test_a_template_that_changes_the_assistants_words_is_refused(chat_tokenizer: LoadedTokenizer) -> None:
    shouting = with_template(
        chat_tokenizer, "{{ messages | length }}{% for m in messages %}{{ m['content'] | upper }}<|im_end|>{% endfor %}"
    )

    with pytest.raises(DataError, match="not to be found"):
        CausalLm().encode(TWO_QUESTIONS, shouting, 200)


def test_the_end_is_learnt_and_padding_masked_where_both_are_one_token(chat_tokenizer: LoadedTokenizer) -> None:
    assert chat_tokenizer.pad_token_id == chat_tokenizer.end_id
    rows = [CausalLm().encode(TextDocument(text=text), chat_tokenizer, 50) for text in ("a longer one", "b")]

    arrays = collate(rows, pad_token_id=chat_tokenizer.pad_token_id)

    end = chat_tokenizer.end_id
    assert arrays["input_ids"][1].tolist()[1:] == [end] * 12
    assert arrays["attention_mask"][1].tolist() == [1, 1] + [0] * 11
    assert arrays["labels"][1].tolist() == [end] + [IGNORED_LABEL] * 12


def test_rows_without_an_answer_within_the_context_are_counted_and_skipped(base_tokenizer: LoadedTokenizer) -> None:
    short = Instruction(text="a", answer="b")
    long = Instruction(text="a" * 60, answer="b")

    found = encode_split(CausalLm(), split_of(short, long), base_tokenizer, 50, for_training=True)

    assert found.examples == (short,)
    assert found.summary.skipped_rows == 1
    assert "1 rows have no label left and are skipped" in found.summary.describe()


def test_an_answer_that_is_cut_keeps_its_beginning(base_tokenizer: LoadedTokenizer) -> None:
    task = CausalLm(template="{text}:")

    encoded = task.encode(Instruction(text="ab", answer="xyz"), base_tokenizer, 6)

    assert encoded.truncated
    assert learnt(encoded, base_tokenizer) == "xy"


def test_a_long_document_becomes_pieces_that_lose_nothing(base_tokenizer: LoadedTokenizer) -> None:
    text = "".join(chr(97 + index % 26) for index in range(95))

    found = encode_split(CausalLm(), split_of(TextDocument(text=text)), base_tokenizer, 32, for_training=True)

    assert [row.tokens for row in found.rows] == [31, 31, 31, 7]
    assert "".join(learnt(row, base_tokenizer) for row in found.rows) == f"{text}</s>"
    assert found.summary.truncated_rows == 0
    assert "1 became 4 rows" in found.summary.describe()


def test_packed_rows_count_their_positions_from_zero_and_keep_their_labels(base_tokenizer: LoadedTokenizer) -> None:
    rows = [TextDocument(text=text) for text in ("abcdefgh", "ab", "abc", "abcde")]
    task = CausalLm(packing=True)
    apart = encode_split(CausalLm(), split_of(*rows), base_tokenizer, 14, for_training=True)

    packed = encode_split(task, split_of(*rows), base_tokenizer, 14, for_training=True)

    assert sorted(row.tokens for row in packed.rows) == [12, 14]
    assert sum(task.count_loss_tokens(row.labels) for row in packed.rows) == apart.summary.loss_tokens
    for row in packed.rows:
        assert row.position_ids is not None
        starts = np.flatnonzero(row.position_ids == 0)
        assert (row.labels[starts[1:] - 1] == IGNORED_LABEL).all(), "no row learns the beginning of the next"
    assert "4 rows share 2 contexts" in packed.summary.describe()


def test_packing_leaves_rows_of_evaluation_alone(base_tokenizer: LoadedTokenizer) -> None:
    rows = [TextDocument(text="ab"), TextDocument(text="cd")]

    found = encode_split(CausalLm(packing=True), split_of(*rows), base_tokenizer, 50, for_training=False)

    assert len(found.rows) == len(found.examples) == 2
    assert all(row.position_ids is None for row in found.rows)


def test_padding_of_packed_rows_counts_as_one_more_row(base_tokenizer: LoadedTokenizer) -> None:
    rows = [TextDocument(text=text) for text in ("abcdefgh", "ab", "abcdefg")]
    packed = encode_split(CausalLm(packing=True), split_of(*rows), base_tokenizer, 14, for_training=True)

    arrays = collate(packed.rows, pad_token_id=0)

    assert "attention_mask" not in arrays
    assert arrays["position_ids"].tolist() == [[*range(10), *range(4)], [*range(9), *range(5)]]


def test_a_prompt_is_what_comes_before_the_answer_in_training(
    chat_tokenizer: LoadedTokenizer, base_tokenizer: LoadedTokenizer
) -> None:
    task = CausalLm()
    for tokenizer in (chat_tokenizer, base_tokenizer):
        for row in (Instruction(text="Add.", context="1 2", answer="3"), TWO_QUESTIONS):
            whole = task.encode(row, tokenizer, 300)
            prompt = task.prompt(row, tokenizer, 300)

            start = max(place for place in range(1, whole.tokens) if starts_answer(whole, place))
            assert prompt.tolist() == whole.input_ids[: start + 1].tolist()


def starts_answer(row: EncodedExample, place: int) -> bool:
    return bool(row.labels[place] != IGNORED_LABEL and row.labels[place - 1] == IGNORED_LABEL)


def test_a_prompt_that_is_too_long_loses_its_beginning_but_not_the_special_tokens(
    base_tokenizer: LoadedTokenizer,
) -> None:
    task = CausalLm(template="Q: {text} A:")

    ids = task.prompt(Instruction(text="0123456789"), base_tokenizer, 8)

    assert base_tokenizer.hf.decode(ids.tolist()) == "<s>6789 A:"


def test_an_answer_ends_where_the_model_ends_it(chat_tokenizer: LoadedTokenizer) -> None:
    ids = [*chat_tokenizer.encode_text("four"), *chat_tokenizer.encode_text("<|im_end|>\nmore")]

    answered = CausalLm().answer(Instruction(text="2+2?"), chat_tokenizer, ids)
    continued = CausalLm().answer(TWO_QUESTIONS, chat_tokenizer, ids)

    assert answered == Instruction(text="2+2?", answer="four")
    assert isinstance(continued, Chat)
    assert continued.messages == (*TWO_QUESTIONS.messages[:-1], Message(role="assistant", content="four"))


def test_stop_ids_are_the_end_of_text_and_of_a_turn(
    chat_tokenizer: LoadedTokenizer, base_tokenizer: LoadedTokenizer
) -> None:
    assert CausalLm().stop_ids(chat_tokenizer) == (chat_tokenizer.hf.convert_tokens_to_ids("<|im_end|>"),)
    assert CausalLm().stop_ids(base_tokenizer) == (base_tokenizer.end_id,)
    other_end = with_template(chat_tokenizer, str(chat_tokenizer.hf.chat_template))
    other_end.hf.eos_token = "<|im_start|>"
    assert CausalLm().stop_ids(other_end) == tuple(
        other_end.hf.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")
    )


def test_single_predictions_are_refused_as_an_answer(base_tokenizer: LoadedTokenizer) -> None:
    row = TextDocument(text="a")
    encoded = CausalLm().encode(row, base_tokenizer, 9)

    with pytest.raises(UsageError, match="generating"):
        CausalLm().decode(row, encoded, encoded.input_ids)


def test_rows_without_answers_are_encoded_as_prompts(chat_tokenizer: LoadedTokenizer) -> None:
    row = Instruction(text="2+2?")

    encoded = CausalLm().encode(row, chat_tokenizer, 100)

    assert np.array_equal(encoded.input_ids, CausalLm().prompt(row, chat_tokenizer, 100))
    assert CausalLm().count_loss_tokens(encoded.labels) == 0


def test_notes_say_how_rows_are_written(chat_tokenizer: LoadedTokenizer, base_tokenizer: LoadedTokenizer) -> None:
    rows: Sequence[Example] = [Instruction(text="a", answer="b")]

    assert "chat template" in CausalLm().notes(rows, chat_tokenizer)[0]
    assert "no chat template" in CausalLm().notes(rows, base_tokenizer)[0]
    assert CausalLm().notes([TextDocument(text="a")], chat_tokenizer) == ()


def test_rows_are_written_as_they_are_read() -> None:
    rows = [
        TextDocument(text="a"),
        Instruction(text="b", context="c", answer="d"),
        chat(("user", "e"), ("assistant", "f")),
    ]

    lines = [json.loads(line) for line in CausalLm().text(rows).split("\n")[:-1]]

    read = [CausalLm().prepare(DataFiles(train=[line])).splits["train"].examples[0] for line in lines]
    assert read == rows


def test_an_empty_text_is_a_row_and_a_prompt_of_one_token_though_no_token_ends_texts(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    tokenizer = LoadedTokenizer(byte_level, "tiny")
    tokenizer.hf.eos_token = None
    nothing = [tokenizer.pad_token_id]

    encoded = CausalLm().encode(TextDocument(text=""), tokenizer, 10)

    assert (encoded.input_ids.tolist(), encoded.labels.tolist()) == (nothing, [IGNORED_LABEL])
    assert CausalLm().prompt(TextDocument(text=""), tokenizer, 10).tolist() == nothing
    summaries = Summarization(template="{text}")
    assert summaries.prompt(SummarizedText(text=""), tokenizer, 10).tolist() == nothing


def test_inputs_that_the_prompt_has_no_place_for_are_told_of_and_refused_where_named() -> None:
    rows = [{"instruction": "a", "input": "b", "output": "c"}, {"instruction": "d", "input": "", "output": "e"}]
    files = DataFiles(train=rows, prompt="Do {text}:")

    assert CausalLm().prepare(files).splits["train"].notes == (
        "the prompt has no {input}: the inputs of 1 row are left out",
    )
    named = DataFiles(train=rows, prompt="Do {text}:", options=ReadOptions(pair_column="input"))
    with pytest.raises(RecipeError, match="no place for the inputs in the column 'input'"):
        CausalLm().prepare(named)
    placed = DataFiles(train=rows, prompt="{input}: {text}", options=ReadOptions(pair_column="input"))
    assert CausalLm().prepare(placed).splits["train"].notes == ()
    without = DataFiles(train=rows[1:], prompt="Do {text}:", options=ReadOptions(pair_column="input"))
    assert CausalLm().prepare(without).splits["train"].notes == ()
