"""How text is written, token by token: what every stage of a generation needs to know."""

import msgspec


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen, and when to stop at the latest.

    Attributes:
        max_new_tokens: Most tokens after a prompt.
        temperature: Logits are divided by it before one is drawn; 0 takes the likeliest token (greedy).
        top_p: Draw only among the likeliest tokens that together have this probability.
        seed: With the row and the position it fixes each draw, whatever the devices or the batches.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
