"""A text or a pair of texts as tokens, as the model's own tokenizer joins them."""

from typing import TYPE_CHECKING

import numpy as np

from coterie.tasks.examples import EncodedExample, LabelArray

if TYPE_CHECKING:
    from coterie.tasks.tokenizer import LoadedTokenizer


def encode_texts(
    text: str, pair: str | None, answer: LabelArray, tokenizer: "LoadedTokenizer", max_tokens: int
) -> EncodedExample:
    """At least one token, token types with them; too long a pair loses tokens of its longer text first.

    Args:
        text: The text.
        pair: The second text of a pair.
        answer: The row's label or score, ().
        tokenizer: The model's.
        max_tokens: Most tokens of the row.
    """
    encoding = tokenizer.hf(text, pair, verbose=False)
    truncated = len(encoding["input_ids"]) > max_tokens
    if truncated:
        encoding = tokenizer.hf(text, pair, truncation="longest_first", max_length=max_tokens, verbose=False)
    types = encoding.get("token_type_ids")
    ids = encoding["input_ids"]
    if not ids:
        ids, types = [tokenizer.id_of_nothing], types and [0]  # GPT-2's tokenizer puts nothing around an empty text
    return EncodedExample(
        input_ids=np.asarray(ids, dtype=np.int64),
        labels=answer,
        token_type_ids=None if types is None else np.asarray(types, dtype=np.int64),
        truncated=truncated,
    )
