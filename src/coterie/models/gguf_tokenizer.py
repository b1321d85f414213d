"""The tokenizer out of a GGUF file, by transformers' own conversion, with what that does not know yet.

It becomes a plain fast tokenizer, not one of the family's class: saved with a model it must load again as it is, and
some classes would put a way of splitting of their own in its place.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_DIGIT_BY_DIGIT = frozenset({"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"})
"""llama.cpp's kinds of splitting that are GPT-2's, but with each digit on its own."""

_AS_GPT2 = frozenset({"default", "gpt-2", "granite-docling", "jais", "mpt", "olmo", "phi-2", "roberta-bpe", "trillion"})
"""Those that are GPT-2's, which is what transformers takes where it knows nothing else."""

_SAME_AS = {"stablelm2": "qwen2"}


def tokenizer_from_gguf(path: Path) -> tuple["PreTrainedTokenizerBase", tuple[str, ...]]:
    """The tokenizer, and what the user should know about it.

    Raises:
        ModelError: The file holds no tokenizer, or one of a kind that transformers does not know.
    """
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - slow to import, as the next one
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer  # noqa: PLC0415

    try:
        architecture, described, settings = get_gguf_tokenizer(str(path))
        described["pre_tokenizer_type"] = _SAME_AS.get(
            described.get("pre_tokenizer_type"), described.get("pre_tokenizer_type")
        )
        _check_merges(described)
        backend, _ = convert_gguf_tokenizer(architecture, described)
    except Exception as error:  # of a broken vocabulary `tokenizers` says no more than that
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{path}: its tokenizer cannot be loaded: {reason}", hint="use the model's Hugging Face folder"
        ) from error
    notes = _split_as_learnt(backend, described.get("tokenizer_type"), described.get("pre_tokenizer_type"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings), notes


def _check_merges(described: dict[str, Any]) -> None:
    """A merge of tokens that are not there would end the process: `tokenizers` panics."""
    if described.get("tokenizer_type") != "gpt2":
        return
    tokens = set(described["tokens"])
    for merge in described.get("merges", ()):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= tokens:
            raise ValueError(f"its vocabulary lacks a part of the merge {merge!r}")


def _split_as_learnt(backend: "Tokenizer", model: str | None, kind: str | None) -> tuple[str, ...]:
    """Make a byte-level tokenizer split text the way its merges were learnt on."""
    from tokenizers import pre_tokenizers  # noqa: PLC0415 - beside its one use
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS  # noqa: PLC0415 - heavy

    if model != "gpt2" or kind in _AS_GPT2 or kind in GGUF_PRE_TOKENIZER_SPLITS:
        return ()
    if kind in _DIGIT_BY_DIGIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        return ()
    note = (
        f"the GGUF file's tokenizer splits text the way of {kind!r}, which is not known here: GPT-2's way is taken, "
        "and rare words or numbers may get other tokens"
    )
    return (note,)
