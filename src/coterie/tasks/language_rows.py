"""Rows of causal models: documents, instructions with their answers, chats, and texts with summaries."""

from collections.abc import Sequence

import msgspec

from coterie.tasks.examples import Example


class TextDocument(Example, frozen=True, kw_only=True):
    """A text, all of which is learnt.

    Attributes:
        text: The text.
        token_ids: Its tokens, where it is a piece of a text longer than the context; None: those of `text`.
        ends: The text ends here: its end is learnt too.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    ends: bool = True


class Instruction(Example, frozen=True, kw_only=True):
    """A question or an order, what it is about if that stands apart, and the answer if there is one already."""

    text: str
    context: str = ""
    answer: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a chat; `role` is `system`, `user`, `assistant`, or what the chat template knows besides."""

    role: str
    content: str


class Chat(Example, frozen=True, kw_only=True):
    """Turns in their order; what the assistant says is learnt."""

    messages: tuple[Message, ...]


class SummarizedText(Example, frozen=True, kw_only=True):
    """A dialogue or other text, and its summaries, all equally right; the first one is learnt."""

    text: str
    summaries: tuple[str, ...] = ()


def field_of_bare_texts(examples: Sequence[Example]) -> str:
    """The field in which a model that learnt these rows should be given a bare text; empty for the usual one.

    Who has learnt to answer is asked; who has learnt texts goes on with one.
    """
    return "instruction" if isinstance(examples[0], Instruction | Chat) else ""
