"""A model's tokenizer, loaded once: which token pads, how long a row may be, how words become tokens."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from coterie.errors import ModelError, RecipeError
from coterie.jobs.model_folder import GGUF
from coterie.tasks.examples import IntArray

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

NO_CONTEXT_LIMIT = 1_000_000
"""Tokens in a row where nothing limits them; tokenizers without a limit say 1e30, which fits no integer type."""

_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<PAD>", "<|finetune_right_pad_id|>", "<|padding|>")
"""Tokens that models keep for padding without naming it as their pad token."""


class WordPieces(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tokens of a sentence given as words.

    Attributes:
        input_ids: (T,), special tokens included.
        token_type_ids: (T,), if the tokenizer makes them.
        word_ids: The word of each token, `None` for special tokens; T entries.
        truncated: Tokens were cut off.
        cut_words: Words that have tokens among those cut off.
    """

    input_ids: IntArray
    token_type_ids: IntArray | None
    word_ids: tuple[int | None, ...]
    truncated: bool
    cut_words: frozenset[int]


class LoadedTokenizer:
    """A Hugging Face tokenizer and what this project needs to know about it.

    Attributes:
        hf: The tokenizer itself, to be saved with the model.
        name: Folder or hub name it came from.
        pad_token_id: The id that fills rows up.
        notes: What was decided for the user, such as a pad token.
    """

    def __init__(self, hf: "PreTrainedTokenizerBase", name: str) -> None:
        self.hf = hf
        self.name = name
        self.notes = _choose_pad_token(hf, name)
        self.pad_token_id = int(hf.pad_token_id)
        self._word_prefix = _word_prefix(hf) if hf.is_fast else ""

    @property
    def class_name(self) -> str:
        """Name of the tokenizer's class."""
        return type(self.hf).__name__

    @property
    def knows_words(self) -> bool:
        """It can say which word each token belongs to (only fast tokenizers can)."""
        return bool(self.hf.is_fast)

    @property
    def special_tokens(self) -> int:
        """Tokens that it adds to every row."""
        return int(self.hf.num_special_tokens_to_add(pair=False))

    @property
    def end_id(self) -> int | None:
        """The id that ends a text (eos), if the tokenizer has one."""
        return None if self.hf.eos_token_id is None else int(self.hf.eos_token_id)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The same as a sequence of one, or of none."""
        return () if self.end_id is None else (self.end_id,)

    @property
    def id_of_nothing(self) -> int:
        """What stands for a text of no token, since no model reads a row of none."""
        return self.pad_token_id if self.end_id is None else self.end_id

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text: ends, beginnings, turns."""
        added = self.hf.added_tokens_decoder.items()
        return frozenset(self.hf.all_special_ids) | {int(index) for index, token in added if token.special}

    @cached_property
    def leading_ids(self) -> tuple[int, ...]:
        """Special tokens that the tokenizer puts before a text (Llama's bos); GPT-2's puts none."""
        with_special = list(self.hf("a")["input_ids"])
        plain = self.encode_text("a")
        starts = range(len(with_special) - len(plain) + 1)
        first = next((start for start in starts if with_special[start : start + len(plain)] == plain), 0)
        return tuple(with_special[:first])

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it; those written out within it are found."""
        return list(self.hf(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return str(self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def encode_words(self, words: Sequence[str], max_tokens: int) -> WordPieces:
        """The tokens of a sentence, at most `max_tokens` with the special ones; `knows_words` must be true."""
        spaced = [word if index == 0 else self._word_prefix + word for index, word in enumerate(words)]
        encoding: BatchEncoding = self.hf(spaced, is_split_into_words=True, truncation=True, max_length=max_tokens)
        types = encoding.get("token_type_ids")
        overflow = encoding.encodings[0].overflowing
        return WordPieces(
            input_ids=np.asarray(encoding["input_ids"], dtype=np.int64),
            token_type_ids=None if types is None else np.asarray(types, dtype=np.int64),
            word_ids=tuple(encoding.word_ids(0)),
            truncated=bool(overflow),
            cut_words=frozenset(word for part in overflow for word in part.word_ids if word is not None),
        )


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False) -> LoadedTokenizer:
    """Load the tokenizer of a model folder, of a GGUF file, or of a hub model (downloaded once).

    Raises:
        ModelError: There is none, or it is damaged.
    """
    if Path(name).suffix == GGUF and Path(name).is_file():
        from coterie.models.gguf_tokenizer import tokenizer_from_gguf  # noqa: PLC0415 - its package loads torch

        from_file, notes = tokenizer_from_gguf(Path(name))
        loaded = LoadedTokenizer(from_file, str(name))
        loaded.notes = (*notes, *loaded.notes)
        return loaded
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import; only where text is encoded

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{name}: its tokenizer cannot be loaded: {reason}",
            hint="the model's folder needs tokenizer.json and tokenizer_config.json (save_pretrained writes both)",
        ) from error
    return LoadedTokenizer(tokenizer, str(name))


def _choose_pad_token(tokenizer: "PreTrainedTokenizerBase", name: str) -> tuple[str, ...]:
    """Give a tokenizer without a pad token one that its vocabulary has already.

    Padding is masked by position, never by id, so a token that also means something (the end of text) can serve.
    """
    if tokenizer.pad_token is not None:
        return ()
    vocabulary = tokenizer.get_vocab()
    candidates = (*_PAD_NAMES, tokenizer.eos_token, tokenizer.unk_token)
    chosen = next((token for token in candidates if token is not None and token in vocabulary), None)
    if chosen is None:
        raise ModelError(
            f"{name}: its tokenizer has no pad token and none that could serve (end of text, unknown)",
            hint="set tokenizer.pad_token to a token of its vocabulary and save it",
        )
    tokenizer.pad_token = chosen
    return (f"the tokenizer has no pad token: {chosen!r} is used (pads are masked), and saved with the model",)


def _word_prefix(tokenizer: "PreTrainedTokenizerBase") -> str:
    """What to put before every word but the first, so that words get the tokens they have in running text.

    Byte-level tokenizers write the space before a word into the word's token; given words one by one, without it, they
    would run them together. Found by trying, so it holds for any family.
    """

    def ids(text: str | list[str]) -> list[int]:
        split = not isinstance(text, str)
        return list(tokenizer(text, is_split_into_words=split, add_special_tokens=False)["input_ids"])

    running = ids("a a")
    return " " if ids(["a", "a"]) != running and ids(["a", " a"]) == running else ""


def context_limit(tokenizer: LoadedTokenizer, *, model_positions: int | None, requested: int | None = None) -> int:
    """Most tokens of a row: what the model's positions and the tokenizer allow, or fewer if so requested.

    Args:
        tokenizer: The model's tokenizer.
        model_positions: Positions that the model can use (RoBERTa's 514 hold 512); `None` if it has no limit.
        requested: The user's limit.

    Raises:
        RecipeError: The request leaves no room beside the special tokens, or exceeds what the model can take.
    """
    limits = [NO_CONTEXT_LIMIT]
    if model_positions is not None:
        limits.append(model_positions)
    if tokenizer.hf.model_max_length < NO_CONTEXT_LIMIT:
        limits.append(int(tokenizer.hf.model_max_length))
    limit = min(limits)
    if requested is None:
        return limit
    if requested > limit:
        raise RecipeError(f"rows of {requested} tokens are asked for, but the model takes {limit}", hint="ask for less")
    if requested <= tokenizer.special_tokens:
        raise RecipeError(
            f"rows of {requested} tokens are asked for, and {tokenizer.special_tokens} of them are special tokens",
            hint="ask for more",
        )
    return requested


def check_vocabulary(tokenizer: LoadedTokenizer, rows: Sequence[IntArray], vocabulary_size: int) -> None:
    """Refuse token ids that the model's embedding does not have.

    Raises:
        ModelError: The tokenizer belongs to another model.
    """
    largest = max((int(ids.max()) for ids in rows if len(ids)), default=0)
    largest = max(largest, tokenizer.pad_token_id)
    if largest >= vocabulary_size:
        raise ModelError(
            f"{tokenizer.name}: the tokenizer makes the token id {largest}, but the model has {vocabulary_size} tokens",
            hint="tokenizer and model do not belong together, or tokens were added without resizing the embedding",
        )
