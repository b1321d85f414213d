"""A tokenizer as GGUF metadata: tokens, their kinds, merges, how text is split, special tokens, chat template."""

import json
from typing import TYPE_CHECKING, Any

from coterie.errors import UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedTokenizerBase

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""ggml's kinds of tokens."""

_CANONICAL = ("llama-bpe", "qwen2", "tekken", "gpt-4o")
"""Of llama.cpp's names for one way of splitting, those that are written."""

_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unk_token_id", "pad": "pad_token_id"}


def write_vocabulary(writer: "GGUFWriter", tokenizer: "PreTrainedTokenizerBase", rows: int) -> None:
    """Write the whole tokenizer into a GGUF file's metadata.

    Args:
        writer: The file that is being written.
        tokenizer: A fast byte-level BPE tokenizer.
        rows: Tokens that the model's embedding has; those that the tokenizer does not use are named `[PAD…]`.

    Raises:
        UnsupportedModelError: The tokenizer is of another kind.
    """
    described = _described(tokenizer)
    model = described["model"]
    tokens, kinds = _tokens(tokenizer, model["vocab"], described.get("added_tokens") or [], rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(described.get("pre_tokenizer")))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writers = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "pad": writer.add_pad_token_id,
    }
    for name, attribute in _SPECIAL.items():
        token_id = getattr(tokenizer, attribute, None)
        if token_id is not None:
            writers[name](int(token_id))
    first, last = _added_at_ends(tokenizer)
    writer.add_add_bos_token(first)
    writer.add_add_eos_token(last)
    writer.add_add_space_prefix(False)  # noqa: FBT003 - gguf's own signature
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)


def _described(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """The tokenizer as the `tokenizers` library writes it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    model = described.get("model") or {}
    decoder = described.get("decoder") or {}
    if model.get("type") != "BPE" or decoder.get("type") != "ByteLevel":
        kind = model.get("type") or type(tokenizer).__name__
        raise UnsupportedModelError(
            f"the tokenizer is a {kind} one; only byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) can be written to GGUF",
            hint="export a Hugging Face folder and convert it with llama.cpp's convert_hf_to_gguf.py",
        )
    return described


def _tokens(
    tokenizer: "PreTrainedTokenizerBase", vocabulary: dict[str, int], added: list[dict[str, Any]], rows: int
) -> tuple[list[str], list[int]]:
    names = {token_id: token for token, token_id in vocabulary.items()}
    kinds = dict.fromkeys(names, _NORMAL)
    for token in added:
        names[token["id"]] = token["content"]
        kinds[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    if names and max(names) >= rows:
        raise UnsupportedModelError(
            f"the tokenizer has the token {names[max(names)]!r} of id {max(names)}, and the model {rows} tokens",
            hint="give the model its own tokenizer",
        )
    assert len(tokenizer) <= rows
    ids = range(rows)
    return [names.get(i, f"[PAD{i}]") for i in ids], [kinds.get(i, _UNUSED) for i in ids]


def _splitting(pre_tokenizer: dict[str, Any] | None) -> str:
    """llama.cpp's name for how text is split before the merges."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS  # noqa: PLC0415 - heavy

    parts = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    kinds = [part.get("type") for part in parts]
    if parts and kinds[-1] == "ByteLevel" and not parts[-1].get("add_prefix_space"):
        by_regex = parts[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and by_regex:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and by_regex and parts[0].get("individual_digits"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not by_regex and parts[0].get("behavior") == "Isolated":
            regex = parts[0].get("pattern", {}).get("Regex")
            for name in _CANONICAL:
                if GGUF_PRE_TOKENIZER_SPLITS.get(name) == regex:
                    return name
    raise UnsupportedModelError(
        "the tokenizer splits text in a way that has no name in GGUF",
        hint="export a Hugging Face folder and convert it with llama.cpp's convert_hf_to_gguf.py",
    )


def _added_at_ends(tokenizer: "PreTrainedTokenizerBase") -> tuple[bool, bool]:
    """Whether the tokenizer puts its bos before a text, and its eos after it."""
    ids = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    extra = len(ids) - len(plain)
    first = extra > 0 and ids[0] == tokenizer.bos_token_id
    last = extra > int(first) and ids[-1] == tokenizer.eos_token_id
    if extra != int(first) + int(last):
        raise UnsupportedModelError(
            "the tokenizer adds special tokens other than bos and eos to a text, which GGUF cannot say",
            hint="export a Hugging Face folder",
        )
    return first, last
