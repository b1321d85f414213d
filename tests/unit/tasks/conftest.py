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
def byte_level() -> PreTrainedTokenizerFast:
    """A tiny GPT-2-like tokenizer: spaces belong to words, no pad token, no special tokens around a row."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = alphabet | {"Ġa": len(alphabet), "<|endoftext|>": len(alphabet) + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
