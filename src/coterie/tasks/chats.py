"""Chats as tokens: by the tokenizer's chat template, or with headings where there is none; and what of them is learnt.

A template is asked for the chat up to each of the assistant's turns, and for what the turn adds: that is learnt.
"""

import re
from collections.abc import Mapping, Sequence

from coterie.errors import DataError
from coterie.tasks.language_encoding import TokenRow
from coterie.tasks.language_rows import Message
from coterie.tasks.tokenizer import LoadedTokenizer

ASSISTANT = "assistant"

TURN_END = "\n\n"
"""What stands between turns with headings."""

_PLACE = "@@coterie: here stand the assistant's words@@"
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def has_chat_template(tokenizer: LoadedTokenizer) -> bool:
    """Chats are written as the tokenizer says."""
    return tokenizer.hf.chat_template is not None


def chat_tokens(tokenizer: LoadedTokenizer, messages: Sequence[Message], line: int) -> TokenRow:
    """A chat; every assistant turn is learnt up to and with the token that ends it.

    Raises:
        DataError: The tokenizer's template refuses the chat, or does not let its turns be told apart.
    """
    if not has_chat_template(tokenizer):
        return _plain_chat_tokens(tokenizer, messages)
    if _GENERATION_BLOCK.search(str(tokenizer.hf.chat_template)):
        return _marked_chat_tokens(tokenizer, messages, line)
    row = _grown_chat_tokens(tokenizer, messages, line)
    return _searched_chat_tokens(tokenizer, messages, line) if row is None else row


def chat_prompt(tokenizer: LoadedTokenizer, messages: Sequence[Message], line: int) -> list[int]:
    """What a model reads before it writes the next assistant turn.

    Raises:
        DataError: The tokenizer's template refuses the chat.
    """
    if has_chat_template(tokenizer):
        return tokenizer.encode_text(render_chat(tokenizer, messages, line, answers=True))
    row = _plain_chat_tokens(tokenizer, messages)
    return [*row.ids, *tokenizer.encode_text(_plain_turn(ASSISTANT, ""))]


def render_chat(tokenizer: LoadedTokenizer, messages: Sequence[Message], line: int, *, answers: bool = False) -> str:
    """A chat as its tokenizer's template writes it; `answers`: up to where the assistant begins to write.

    Raises:
        DataError: The template refuses the chat.
    """
    from jinja2 import TemplateError  # noqa: PLC0415 - only where there is a template

    try:
        return str(tokenizer.hf.apply_chat_template(_as_dicts(messages), tokenize=False, add_generation_prompt=answers))
    except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
        raise _refused(line, error) from error


def _plain_turn(role: str, content: str) -> str:
    return f"### {role.capitalize()}:\n{content}"


def _plain_chat_tokens(tokenizer: LoadedTokenizer, messages: Sequence[Message]) -> TokenRow:
    """`### User:`, a line end, the text, an empty line, and so on; each answer ends with the end of text."""
    row = TokenRow([], [])
    row.add(tokenizer.leading_ids, learnt=False)
    for message in messages:
        if message.role == ASSISTANT:
            row.add(tokenizer.encode_text(_plain_turn(ASSISTANT, "")), learnt=False)
            row.add([*tokenizer.encode_text(message.content), *tokenizer.end_ids], learnt=True)
            row.add(tokenizer.encode_text(TURN_END), learnt=False)
        else:
            row.add(tokenizer.encode_text(_plain_turn(message.role, message.content) + TURN_END), learnt=False)
    return row


def _grown_chat_tokens(tokenizer: LoadedTokenizer, messages: Sequence[Message], line: int) -> TokenRow | None:
    """A chat rendered turn by turn: what an assistant's turn adds to what it is asked with is learnt.

    None if the template writes earlier turns differently when more follows, or the assistant begins.
    """
    row = TokenRow([], [])
    done = ""
    for index, message in enumerate(messages):
        if message.role != ASSISTANT:
            continue
        if index == 0:
            return None  # it answers nothing, and no template writes an empty chat
        before = render_chat(tokenizer, messages[:index], line, answers=True)
        through = render_chat(tokenizer, messages[: index + 1], line)
        if not before.startswith(done) or not through.startswith(before):
            return None
        row.add(tokenizer.encode_text(before.removeprefix(done)), learnt=False)
        answer = tokenizer.encode_text(through.removeprefix(before))
        written = _length_with_end(tokenizer, answer)
        row.add(answer[:written], learnt=True)
        row.add(answer[written:], learnt=False)
        done = through
    whole = done if messages[-1].role == ASSISTANT else render_chat(tokenizer, messages, line)
    if not whole.startswith(done):
        return None
    row.add(tokenizer.encode_text(whole.removeprefix(done)), learnt=False)
    return row


def _searched_chat_tokens(tokenizer: LoadedTokenizer, messages: Sequence[Message], line: int) -> TokenRow:
    """A chat rendered as a whole: the assistant's words are learnt where they stand, and the special token after them.

    For templates that write a turn differently when more follows (Qwen3 drops the thoughts of earlier ones).
    """
    whole = render_chat(tokenizer, messages, line)
    row = TokenRow([], [])
    done = 0
    for index, message in enumerate(messages):
        if message.role != ASSISTANT:
            continue
        changed = [*messages[:index], Message(role=ASSISTANT, content=_PLACE), *messages[index + 1 :]]
        start = render_chat(tokenizer, changed, line).find(_PLACE)
        words = message.content.strip()
        if start < done or not whole.startswith(words, start):
            raise _inseparable(line)
        _add_template(row, tokenizer, whole[done:start], after_answer=done > 0)
        row.add(tokenizer.encode_text(words), learnt=True)
        done = start + len(words)
    _add_template(row, tokenizer, whole[done:], after_answer=done > 0)
    return row


def _add_template(row: TokenRow, tokenizer: LoadedTokenizer, text: str, *, after_answer: bool) -> None:
    """What the template writes between answers; it begins with what ends an answer, up to the first special token."""
    ids = tokenizer.encode_text(text)
    special = tokenizer.special_ids
    end = next((index + 1 for index, token in enumerate(ids) if token in special), 0) if after_answer else 0
    row.add(ids[:end], learnt=True)
    row.add(ids[end:], learnt=False)


def _marked_chat_tokens(tokenizer: LoadedTokenizer, messages: Sequence[Message], line: int) -> TokenRow:
    """A chat by a template that marks the assistant's words itself (`{% generation %}`)."""
    from jinja2 import TemplateError  # noqa: PLC0415 - only where there is a template

    try:
        encoded = tokenizer.hf.apply_chat_template(
            _as_dicts(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
        raise _refused(line, error) from error
    return TokenRow(list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]])


def _length_with_end(tokenizer: LoadedTokenizer, answer: Sequence[int]) -> int:
    """Tokens of an assistant's turn up to its last special one: what follows (a line end) is the template's."""
    special = tokenizer.special_ids
    return next((index + 1 for index in reversed(range(len(answer))) if answer[index] in special), len(answer))


def _as_dicts(messages: Sequence[Message]) -> list[Mapping[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _at(line: int) -> str:
    return f"the chat in line {line}" if line else "a chat"


def _refused(line: int, error: Exception) -> DataError:
    return DataError(
        f"the tokenizer's chat template refuses {_at(line)}: {error}",
        hint="templates want certain roles in a certain order, usually user and assistant in turn",
    )


def _inseparable(line: int) -> DataError:
    return DataError(
        f"the assistant's words are not to be found in what the tokenizer's chat template makes of {_at(line)}",
        hint="use a template that marks them with {% generation %}, or one that leaves them as they are",
    )
