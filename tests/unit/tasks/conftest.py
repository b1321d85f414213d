import copy

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from coterie.tasks.tokenizer import LoadedTokenizer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "a", "in", "pa", "##ris", "ber", "##lin", "lives", "##x", "x", "."]


@pytest.fixture(scope="session")
def word_piece() -> PreTrainedTokenizerFast:
    """A tiny BERT-like tokenizer: `paris` is `pa ##ris`, `berlin` is `ber ##lin`."""
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


@pytest.fixture
def tokenizer(word_piece: PreTrainedTokenizerFast) -> LoadedTokenizer:
    return LoadedTokenizer(word_piece, "tiny")


@pytest.fixture
def pair_tokenizer(word_piece: PreTrainedTokenizerFast) -> LoadedTokenizer:
    """The same, which also joins two texts as BERT does."""
    joining = copy.deepcopy(word_piece)
    joining.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return LoadedTokenizer(joining, "tiny")


@pytest.fixture
def byte_level() -> PreTrainedTokenizerFast:
    """A tiny GPT-2-like tokenizer: spaces belong to words, no pad token, no special tokens around a row."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = alphabet | {"Ġa": len(alphabet), "<|endoftext|>": len(alphabet) + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


CHAT_ML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*special: str, template: str | None = None, **names: str) -> PreTrainedTokenizerFast:
    """A token for every byte, and special ones from 256 on."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*symbols, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names)


@pytest.fixture(scope="session")
def chat_tokenizer() -> LoadedTokenizer:
    """As SmolLM2-Instruct's: ChatML, the end of a turn is the end of text and the pad token, nothing before a text."""
    special = ("<|im_start|>", "<|im_end|>")
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return LoadedTokenizer(byte_tokenizer(*special, template=CHAT_ML, **names), "chat")


@pytest.fixture(scope="session")
def base_tokenizer() -> LoadedTokenizer:
    """As a base Llama's: a token before each text, one for its end, no chat template, no pad token."""
    hf = byte_tokenizer("<s>", "</s>", bos_token="<s>", eos_token="</s>")
    ids = [("<s>", hf.convert_tokens_to_ids("<s>"))]
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=ids)
    return LoadedTokenizer(hf, "base")
