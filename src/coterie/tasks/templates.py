"""How a row becomes the text that a causal model reads, and which of its tokens it learns to write.

A tokenizer with a chat template: instructions and chats are written by it. One without: turns are written like
`### Instruction:`, and an answer is followed by the end-of-text token. Prompt and answer become tokens apart from each
other, so a prompt has the same tokens in training as in generation.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from coterie.errors import RecipeError
from coterie.tasks.chats import ASSISTANT, TURN_END, chat_prompt, chat_tokens, has_chat_template
from coterie.tasks.language_encoding import TokenRow
from coterie.tasks.language_rows import Message
from coterie.tasks.tokenizer import LoadedTokenizer

_FIELDS = re.compile(r"\{(text|input)\}")


class Prompt(NamedTuple):
    """What an answer follows: as a user of a chat says it, and as a model without a chat template reads it."""

    said: str
    plain: str


def fill_prompt(template: str, text: str, context: str = "") -> str:
    """A prompt template with `{text}` and `{input}` filled in; other braces stay as they are."""
    values = {"text": text, "input": context}
    return _FIELDS.sub(lambda found: values[found[1]], template)


def check_prompt(template: str) -> None:
    """Refuse a template that does not say where the text stands.

    Raises:
        RecipeError: It does not.
    """
    if "{text}" not in template:
        raise RecipeError(f"the prompt {template!r} has no place for the text", hint="write {text} where it belongs")


def instruction_texts(text: str, context: str, template: str | None) -> Prompt:
    """An instruction as a user of a chat says it, and as a model without a chat template reads it."""
    if template is not None:
        filled = fill_prompt(template, text, context)
        return Prompt(filled, filled)
    middle = f"### Input:\n{context}{TURN_END}" if context else ""
    said = f"{text}{TURN_END}{context}" if context else text
    return Prompt(said, f"### Instruction:\n{text}{TURN_END}{middle}### Response:\n")


def answer_tokens(tokenizer: LoadedTokenizer, prompt: Prompt, answer: str | None, line: int) -> TokenRow:
    """A prompt, not learnt, and if there is one its answer with its end, learnt.

    Raises:
        DataError: The tokenizer's chat template refuses it.
    """
    row = TokenRow([], [])
    if answer is None:
        row.add(answer_prompt(tokenizer, prompt, line), learnt=False)
    elif has_chat_template(tokenizer):
        turns = (Message(role="user", content=prompt.said), Message(role=ASSISTANT, content=answer))
        return chat_tokens(tokenizer, turns, line)
    else:
        row.add(answer_prompt(tokenizer, prompt, line), learnt=False)
        row.add([*tokenizer.encode_text(answer), *tokenizer.end_ids], learnt=True)
    return row


def answer_prompt(tokenizer: LoadedTokenizer, prompt: Prompt, line: int) -> list[int]:
    """What a model reads before it writes its answer.

    Raises:
        DataError: The tokenizer's chat template refuses it.
    """
    if has_chat_template(tokenizer):
        return chat_prompt(tokenizer, (Message(role="user", content=prompt.said),), line)
    return [*tokenizer.leading_ids, *tokenizer.encode_text(prompt.plain)]


def generated_text(tokenizer: LoadedTokenizer, generated_ids: Sequence[int]) -> str:
    """The text of generated ids up to the first that ends an answer."""
    ends = turn_end_ids(tokenizer)
    ids = [int(token) for token in generated_ids]
    first = next((index for index, token in enumerate(ids) if token in ends), len(ids))
    return tokenizer.decode(ids[:first])


def document_tokens(tokenizer: LoadedTokenizer, ids: Sequence[int], *, ends: bool = True) -> TokenRow:
    """A text, all of it learnt, its end included."""
    row = TokenRow([], [])
    row.add(tokenizer.leading_ids, learnt=False)
    row.add(ids, learnt=True)
    if ends:
        row.add(tokenizer.end_ids, learnt=True)
    return row


def turn_end_ids(tokenizer: LoadedTokenizer) -> tuple[int, ...]:
    """Ids that end an answer: the end of text, and the token that the chat template puts after an assistant's turn."""
    ends = dict.fromkeys(tokenizer.end_ids)
    if has_chat_template(tokenizer):
        example = (Message(role="user", content="a"), Message(role=ASSISTANT, content="b"))
        row = chat_tokens(tokenizer, example, 0)
        written = [token for token, learnt in zip(row.ids, row.learnt, strict=True) if learnt]
        if written and written[-1] in tokenizer.special_ids:
            ends.setdefault(written[-1])
    return tuple(ends)
