import pytest

from coterie.errors import DataError
from coterie.tasks.data_summary import encode_split
from coterie.tasks.examples import IGNORED_LABEL, EncodedExample
from coterie.tasks.language_rows import SummarizedText
from coterie.tasks.summarization import Summarization
from coterie.tasks.task import DataFiles, Split
from coterie.tasks.tokenizer import LoadedTokenizer

ROW = SummarizedText(text="#Person1#: Hi.\n#Person2#: Hello.", summaries=("They meet.", "Two greet."))


def spelled(encoded: EncodedExample, tokenizer: LoadedTokenizer) -> tuple[str, str]:
    """The whole row, and what is learnt of it."""
    labels = encoded.labels[encoded.labels != IGNORED_LABEL]
    return tokenizer.hf.decode(encoded.input_ids.tolist()), tokenizer.hf.decode(labels.tolist())


def test_the_first_summary_is_learnt_after_the_dialogue(base_tokenizer: LoadedTokenizer) -> None:
    whole, learnt = spelled(Summarization().encode(ROW, base_tokenizer, 300), base_tokenizer)

    assert whole == f"<s>Summarize the following dialogue.\n\n{ROW.text}\n\nSummary:\nThey meet.</s>"
    assert learnt == "They meet.</s>"


def test_with_a_chat_template_the_user_asks_for_the_summary(chat_tokenizer: LoadedTokenizer) -> None:
    whole, learnt = spelled(Summarization().encode(ROW, chat_tokenizer, 300), chat_tokenizer)

    assert whole == (
        f"<|im_start|>user\nSummarize the following dialogue.\n\n{ROW.text}<|im_end|>\n"
        "<|im_start|>assistant\nThey meet.<|im_end|>\n"
    )
    assert learnt == "They meet.<|im_end|>"


def test_a_prompt_of_ones_own_takes_the_place_of_both(
    base_tokenizer: LoadedTokenizer, chat_tokenizer: LoadedTokenizer
) -> None:
    task = Summarization(template="{text}\nTL;DR: ")

    plain, _ = spelled(task.encode(ROW, base_tokenizer, 300), base_tokenizer)
    said, _ = spelled(task.encode(ROW, chat_tokenizer, 300), chat_tokenizer)

    assert plain == f"<s>{ROW.text}\nTL;DR: They meet.</s>"
    assert said.startswith(f"<|im_start|>user\n{ROW.text}\nTL;DR: <|im_end|>")


def test_a_dialogue_that_is_too_long_loses_its_end_and_the_summary_stays_whole(
    base_tokenizer: LoadedTokenizer, chat_tokenizer: LoadedTokenizer
) -> None:
    row = SummarizedText(text="".join(chr(97 + index % 26) for index in range(500)), summaries=("They meet.",))
    for tokenizer, most in ((base_tokenizer, 120), (chat_tokenizer, 160)):
        encoded = Summarization().encode(row, tokenizer, most)
        whole, learnt = spelled(encoded, tokenizer)

        assert encoded.truncated
        assert encoded.tokens == most
        assert learnt.startswith("They meet.")
        assert f"dialogue.\n\n{row.text[:20]}" in whole


def test_a_summary_longer_than_the_context_keeps_its_beginning(base_tokenizer: LoadedTokenizer) -> None:
    row = SummarizedText(text="abc", summaries=("x" * 200,))

    encoded = Summarization(template="{text}:").encode(row, base_tokenizer, 40)

    assert encoded.tokens == 40
    assert spelled(encoded, base_tokenizer)[1] == "x" * 38


def test_where_not_even_the_prompt_fits_rows_are_refused(base_tokenizer: LoadedTokenizer) -> None:
    split = Split(name="train", source="made.jsonl", examples=(ROW,))

    with pytest.raises(DataError, match="none of 1 rows has a labelled token within 20"):
        encode_split(Summarization(), split, base_tokenizer, 20, for_training=True)


def test_a_prompt_is_cut_as_a_row_is(base_tokenizer: LoadedTokenizer) -> None:
    row = SummarizedText(text="ab" * 300)

    ids = Summarization().prompt(row, base_tokenizer, 100)

    prompt = base_tokenizer.hf.decode(ids.tolist())
    assert len(ids) <= 100
    assert prompt.startswith("<s>Summarize the following dialogue.\n\nabab")
    assert prompt.endswith("a\n\nSummary:\n")


def test_a_generated_summary_replaces_the_rows_own(base_tokenizer: LoadedTokenizer) -> None:
    ids = [*base_tokenizer.encode_text(" A greeting. "), base_tokenizer.end_id or 0, 5]

    answered = Summarization().answer(ROW, base_tokenizer, ids)

    assert answered == SummarizedText(text=ROW.text, summaries=("A greeting.",))


def test_generated_summaries_are_compared_with_the_nearest_of_the_rows_own() -> None:
    metric = Summarization().generation_metric()

    metric.add(ROW, SummarizedText(text=ROW.text, summaries=("Two greet.",)))
    metric.add(ROW, SummarizedText(text=ROW.text, summaries=("They met them.",)))

    figures = metric.result()
    assert figures["answers"] == 2
    assert figures["exact_match"] == 0.5
    assert figures["rouge_1"] == pytest.approx((1.0 + 0.4) / 2)
    assert "2 answers: ROUGE-1 70.0%" in metric.report()


def test_dialogsum_and_mts_dialog_are_read_as_they_are() -> None:
    dialogsum = {"fname": "train_0", "dialogue": "#Person1#: Hi", "summary": "A greeting.", "topic": "greeting"}
    several = {"fname": "t", "dialogue": "d", "summary1": "a", "topic1": "x", "summary2": "b", "topic2": "y"}
    mts = {"id": "0", "section": "GENHX", "dialogue": "Doctor: Hi", "summary": "Well."}

    data = Summarization().prepare(DataFiles(train=[dialogsum], dev=[mts], test=[several]))

    rows = {name: split.examples[0] for name, split in data.splits.items()}
    assert rows["train"] == SummarizedText(text="#Person1#: Hi", summaries=("A greeting.",))
    assert rows["dev"] == SummarizedText(text="Doctor: Hi", summaries=("Well.",))
    assert rows["test"] == SummarizedText(text="d", summaries=("a", "b"))
    assert data.config_overrides == {}


def test_rows_with_blank_summaries_are_counted_and_not_learnt(chat_tokenizer: LoadedTokenizer) -> None:
    rows = [{"dialogue": "Hi.", "summary": "They meet."}, {"dialogue": "Ho.", "summary": ""}]
    read = Summarization().prepare(DataFiles(train=rows)).splits["train"]

    learnt = encode_split(Summarization(), read, chat_tokenizer, 300, for_training=True)
    evaluated = encode_split(Summarization(), read, chat_tokenizer, 300, for_training=False)

    assert [row.text for row in learnt.examples if isinstance(row, SummarizedText)] == ["Hi."]
    assert "1 rows have no label left and are skipped" in learnt.summary.describe()
    assert len(evaluated.rows) == 2
