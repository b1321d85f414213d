"""How a row becomes the text that a causal model reads, and which of its tokens it learns to write.

A tokenizer with a chat template: instructions and chats are written by it. One without: turns are written like
`### Instruction:`, and an answer is followed by the end-of-text token. Prompt and answer become tokens apart from each
other, so a prompt has the same tokens in training as in generation.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coterie.errors import DataError, RecipeError
from coterie.tasks.language_rows import Message
from coterie.tasks.tokenizer import LoadedTokenizer

ASSISTANT = "assistant"

_TURN_END = "\n\n"
_FIELDS = re.compile(r"\{(text|input)\}")
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TokenRow(NamedTuple):
    """Token ids, and for each whether the model learns to write it; equally many of both."""

    ids: list[int]
    learnt: list[bool]

    def add(self, ids: Sequence[int], *, learnt: bool) -> None:
        """Append tokens that are all learnt or all not."""
        self.ids.extend(ids)
        self.learnt.extend([learnt] * len(ids))


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
    middle = f"### Input:\n{context}{_TURN_END}" if context else ""
    said = f"{text}{_TURN_END}{context}" if context else text
    return Prompt(said, f"### Instruction:\n{text}{_TURN_END}{middle}### Response:\n")


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
        row.add([*tokenizer.encode_text(answer), *_end(tokenizer)], learnt=True)
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


def has_chat_template(tokenizer: LoadedTokenizer) -> bool:
    """Chats are written as the tokenizer says."""
    return tokenizer.hf.chat_template is not None


def document_tokens(tokenizer: LoadedTokenizer, ids: Sequence[int], *, ends: bool = True) -> TokenRow:
    """A text, all of it learnt, its end included."""
    row = TokenRow([], [])
    row.add(tokenizer.leading_ids, learnt=False)
    row.add(ids, learnt=True)
    if ends:
        row.add(_end(tokenizer), learnt=True)
    return row


def chat_tokens(tokenizer: LoadedTokenizer, messages: Sequence[Message], line: int) -> TokenRow:
    """A chat; every assistant turn is learnt up to and with the token that ends it.

    Raises:
        DataError: The tokenizer's template refuses the chat, or does not let its turns be told apart.
    """
    if not has_chat_template(tokenizer):
        return _plain_chat_tokens(tokenizer, messages)
    if _GENERATION_BLOCK.search(str(tokenizer.hf.chat_template)):
        return _marked_chat_tokens(tokenizer, messages, line)
    row = TokenRow([], [])
    done = ""
    for index, message in enumerate(messages):
        if message.role != ASSISTANT:
            continue
        before = render_chat(tokenizer, messages[:index], line, answers=True)
        through = render_chat(tokenizer, messages[: index + 1], line)
        if not before.startswith(done) or not through.startswith(before):
            raise _inseparable(line)
        row.add(tokenizer.encode_text(before.removeprefix(done)), learnt=False)
        answer = tokenizer.encode_text(through.removeprefix(before))
        written = _length_with_end(tokenizer, answer)
        row.add(answer[:written], learnt=True)
        row.add(answer[written:], learnt=False)
        done = through
    if messages[-1].role != ASSISTANT:
        whole = render_chat(tokenizer, messages, line)
        if not whole.startswith(done):
            raise _inseparable(line)
        row.add(tokenizer.encode_text(whole.removeprefix(done)), learnt=False)
    return row


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


def turn_end_ids(tokenizer: LoadedTokenizer) -> tuple[int, ...]:
    """Ids that end an answer: the end of text, and the token that the chat template puts after an assistant's turn."""
    ends = dict.fromkeys(_end(tokenizer))
    if has_chat_template(tokenizer):
        example = (Message(role="user", content="a"), Message(role=ASSISTANT, content="b"))
        row = chat_tokens(tokenizer, example, 0)
        written = [token for token, learnt in zip(row.ids, row.learnt, strict=True) if learnt]
        if written and written[-1] in tokenizer.special_ids:
            ends.setdefault(written[-1])
    return tuple(ends)


def _end(tokenizer: LoadedTokenizer) -> list[int]:
    return [] if tokenizer.end_id is None else [tokenizer.end_id]


def _plain_turn(role: str, content: str) -> str:
    return f"### {role.capitalize()}:\n{content}"


def _plain_chat_tokens(tokenizer: LoadedTokenizer, messages: Sequence[Message]) -> TokenRow:
    """`### User:`, a line end, the text, an empty line, and so on; each answer ends with the end of text."""
    row = TokenRow([], [])
    row.add(tokenizer.leading_ids, learnt=False)
    for message in messages:
        if message.role == ASSISTANT:
            row.add(tokenizer.encode_text(_plain_turn(ASSISTANT, "")), learnt=False)
            row.add([*tokenizer.encode_text(message.content), *_end(tokenizer)], learnt=True)
            row.add(tokenizer.encode_text(_TURN_END), learnt=False)
        else:
            row.add(tokenizer.encode_text(_plain_turn(message.role, message.content) + _TURN_END), learnt=False)
    return row


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
        f"the tokenizer's chat template writes the beginning of {_at(line)} differently when more follows, so that "
        "the assistant's words cannot be told apart",
        hint="use chats of one question and one answer, or a template that marks answers with {% generation %}",
    )
