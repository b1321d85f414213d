"""Rows of causal models, and how bare texts become like them."""

import pytest

from coterie.tasks.language_rows import (
    Chat,
    Instruction,
    Message,
    SummarizedText,
    TextDocument,
    field_of_bare_texts,
)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (TextDocument(text="a"), ""),
        (SummarizedText(text="a"), ""),
        (Instruction(text="a", answer="b"), "instruction"),
        (Chat(messages=(Message(role="user", content="a"),)), "instruction"),
    ],
)
def test_who_learnt_to_answer_is_asked_and_who_learnt_texts_goes_on(row, field):
    assert field_of_bare_texts((row,)) == field
