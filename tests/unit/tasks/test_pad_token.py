"""Case 11: no pad token with batch > 1 (GPT-2, Llama classification): one is chosen, said, saved."""

import copy

from coterie.tasks.pad_token import agree_on_pad
from coterie.tasks.tokenizer import LoadedTokenizer


def test_a_model_without_a_pad_token_gets_the_tokenizer_s_and_it_is_said(byte_level):
    tokenizer = LoadedTokenizer(byte_level, "tiny")
    for absent in (None, -1):
        assert agree_on_pad(tokenizer, absent) == {"pad_token_id": tokenizer.pad_token_id}
    assert "the tokenizer has no pad token: '<|endoftext|>' is used" in tokenizer.notes[0]
    assert "the model's config has no pad token: '<|endoftext|>'" in tokenizer.notes[1]


def test_where_both_have_one_the_model_s_is_used_and_saved_with_the_tokenizer(word_piece):
    tokenizer = LoadedTokenizer(copy.deepcopy(word_piece), "tiny")
    assert agree_on_pad(tokenizer, 0) == {}
    assert tokenizer.notes == ()
    assert agree_on_pad(tokenizer, 1) == {}
    assert (tokenizer.pad_token_id, tokenizer.hf.pad_token) == (1, "[UNK]")
    assert "the tokenizer pads by '[PAD]', the model's config says '[UNK]'" in tokenizer.notes[0]


def test_a_pad_token_that_the_tokenizer_does_not_know_gives_way(word_piece):
    tokenizer = LoadedTokenizer(word_piece, "tiny")
    assert agree_on_pad(tokenizer, 999) == {"pad_token_id": 0}
