"""A model of any BERT shape with random weights, and data whose rows all have the same number of tokens.

Right for time, memory and bytes; silent about quality.
"""

import json
import random
from pathlib import Path

import torch

SHAPES = {
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
VOCABULARY = 30_522
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TAGS = ("O", "B-PER", "B-LOC", "B-ORG", "B-MISC")


def make_model(folder: Path, shape: str) -> Path:
    """Save a random model of this shape with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from coterie.models.whole import quiet_transformers

    torch.manual_seed(0)
    config = BertConfig(**SHAPES[shape], vocab_size=VOCABULARY, max_position_embeddings=512)
    with quiet_transformers():  # "Writing model shards", in the middle of the figures
        BertModel(config).save_pretrained(folder)
    words = [*_SPECIAL, *(f"w{index}" for index in range(VOCABULARY - len(_SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    return folder


def make_data(path: Path, rows: int, tokens: int) -> Path:
    """Tagged sentences of exactly `tokens` tokens each, the two special ones included."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            words = [f"w{draw.randrange(1000)}" for _ in range(tokens - 2)]
            tags = [draw.choice(_TAGS) for _ in words]
            file.write(json.dumps({"tokens": words, "tags": tags}) + "\n")
    return path
