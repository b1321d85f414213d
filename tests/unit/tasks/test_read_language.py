from pathlib import Path

import pytest

from coterie.errors import DataError
from coterie.tasks.language_rows import Chat, Instruction, Message, TextDocument
from coterie.tasks.read_language import read_language, read_summaries
from coterie.tasks.readers.options import ReadOptions

USUAL = ReadOptions()


def read(source: object, **options: object) -> tuple[object, ...]:
    return read_language(source, split="train", options=ReadOptions(**options)).examples  # type: ignore[arg-type]


def test_blank_lines_separate_documents(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes("\n\nOne\r\nstill one \u2028 here\r\n\n  \nTwo\n".encode())

    assert read(file) == (
        TextDocument(text="One\nstill one \u2028 here", line=3),
        TextDocument(text="Two", line=7),
    )


def test_without_blank_lines_every_line_is_a_document(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("One 🙂\nשתיים\n\n", encoding="utf-8")

    assert read(file) == (TextDocument(text="One 🙂", line=1), TextDocument(text="שתיים", line=2))


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "marked.txt"
    file.write_bytes(b"\xef\xbb\xbfOne")

    assert read(file) == (TextDocument(text="One", line=1),)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.txt", b"one\nt\0wo", "t.txt:2: a NUL byte"),
        ("t.txt", b" \n\n", "t.txt: holds no text"),
        ("t.jsonl", b'{"text": "a"}\n{"text": "b"', "t.jsonl:2: broken JSON"),
        ("t.jsonl", b'{"text": "a"}\n\n{"texts": "b"}', "t.jsonl:3: the text is absent"),
        ("t.jsonl", b'{"text": 3}', "t.jsonl:1: the text is int '3', not a string"),
        ("t.jsonl", b'{"question": "a", "answer": null}', "t.jsonl:1: the answer is absent"),
        ("t.jsonl", b'{"question": "a"}', "t.jsonl:1: has no column output or response"),
        ("t.jsonl", b'{"a": "b"}', "t.jsonl:1: has no column messages"),
        ("t.jsonl", b'{"messages": []}', "t.jsonl:1: the chat is no list"),
        ("t.jsonl", b'{"messages": [{"content": "a"}]}', "t.jsonl:1, message 1: has no role"),
        ("t.jsonl", b'{"messages": [{"role": "user"}]}', "t.jsonl:1, message 1: the content is absent"),
    ],
)
def test_broken_data_are_refused_with_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)

    with pytest.raises(DataError) as caught:
        read(file)

    assert message in str(caught.value)


def test_json_lines_may_hold_every_kind_of_line_end_within_strings(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"text": "a\u2028b\x85c"}\n\n{"text": "d"}\n', encoding="utf-8")

    assert read(file) == (TextDocument(text="a\u2028b\x85c", line=1), TextDocument(text="d", line=3))


def test_instructions_are_known_by_their_columns() -> None:
    self_instruct = {"id": "s", "instruction": "Add.", "input": "1 2", "output": "3"}
    gsm8k = {"question": "1+1?", "answer": "#### 2"}

    assert read([self_instruct]) == (Instruction(text="Add.", context="1 2", answer="3"),)
    assert read([gsm8k]) == (Instruction(text="1+1?", answer="#### 2"),)
    assert read([{"prompt": "a", "completion": "b"}]) == (Instruction(text="a", answer="b"),)


def test_an_input_that_the_first_row_lacks_is_read_from_the_others() -> None:
    rows = [{"instruction": "Sing.", "output": "la"}, {"instruction": "Add.", "input": "1 2", "output": "3"}]

    assert read(rows) == (Instruction(text="Sing.", answer="la"), Instruction(text="Add.", context="1 2", answer="3"))
    with pytest.raises(DataError, match="no column 'inputs'"):
        read(rows, pair_column="inputs")
    dev = read_language(rows, split="dev", options=ReadOptions(pair_column="inputs")).examples
    assert [getattr(row, "context", None) for row in dev] == ["", ""]


def test_named_columns_make_instructions_of_any_row() -> None:
    row = {"title": "T", "body": "B", "reply": "R"}

    found = read([row], text_column="title", pair_column="body", label_column="reply")

    assert found == (Instruction(text="T", context="B", answer="R"),)


def test_chats_are_read_in_both_usual_forms() -> None:
    messages = (Message(role="user", content="hi"), Message(role="assistant", content="yo"))
    plain = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    shared = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}

    assert read([plain]) == read([shared]) == (Chat(messages=messages),)


def test_a_chat_written_as_a_string_is_not_learnt_as_a_text() -> None:
    with pytest.raises(DataError, match="the chat is no list of messages"):
        read([{"messages": '[{"role": "user", "content": "hi"}]'}])


def test_answers_are_not_needed_where_they_are_asked_for() -> None:
    assert read([{"question": "1+1?"}], tagged=False) == (Instruction(text="1+1?"),)
    assert read([{"question": "1+1?", "answer": "2"}], tagged=False) == (Instruction(text="1+1?"),)
    found = read_summaries([{"dialogue": "d"}], split="test", options=ReadOptions(tagged=False)).examples[0]
    assert getattr(found, "summaries", None) == ()


def test_a_row_without_a_summary_is_refused() -> None:
    rows = [{"dialogue": "d", "summary": "s"}, {"dialogue": "e", "summary": None}]

    with pytest.raises(DataError, match="row 1: has no summary"):
        read_summaries(rows, split="train", options=USUAL)
    with pytest.raises(DataError, match="has no column summary"):
        read_summaries([{"dialogue": "d"}], split="train", options=USUAL)


def test_a_blank_answer_is_none_that_could_be_learnt(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("question,answer\n1+1?,2\n2+2?,\n3+3?,  \n")
    rows = [{"dialogue": "d", "summary": " "}, {"dialogue": "e", "summary": ["", "s"]}]

    assert [getattr(row, "answer", "") for row in read(file)] == ["2", None, None]
    found = read_summaries(rows, split="train", options=USUAL).examples
    assert [getattr(row, "summaries", None) for row in found] == [(), ("s",)]
