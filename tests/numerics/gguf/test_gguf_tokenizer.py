"""The tokenizer out of a GGUF file splits text as its merges were learnt, keeps its chat template, and saves whole."""

import gguf
import pytest
from transformers import AutoTokenizer

from coterie.errors import ModelError
from coterie.tasks.tokenizer import load_tokenizer


def test_smollm_splits_digit_by_digit(make_gguf):
    tokenizer = load_tokenizer(make_gguf("llama", pre="smollm"))
    assert tokenizer.hf.tokenize("the 12") == ["t", "he", "Ġ", "1", "2"]
    assert tokenizer.notes == ()
    gpt2 = load_tokenizer(make_gguf("llama", pre="gpt-2"))
    assert gpt2.hf.tokenize("the 12") == ["t", "he", "Ġ", "12"]


def test_special_tokens_and_chat_template_are_those_of_the_file(make_gguf):
    tokenizer = load_tokenizer(make_gguf("llama"))
    assert (tokenizer.hf.bos_token_id, tokenizer.hf.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    laid_out = tokenizer.hf.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert laid_out == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.hf("<|im_end|>")["input_ids"] == [2]
    assert tokenizer.special_tokens == 0


def test_saved_with_a_model_it_loads_again_as_it_was(make_gguf, tmp_path):
    tokenizer = load_tokenizer(make_gguf("llama")).hf
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>the 1234 at ü\n"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == tokenizer.chat_template
    assert again.pad_token_id == again.eos_token_id == 2


def test_an_unknown_way_of_splitting_is_said(make_gguf):
    (note,) = load_tokenizer(make_gguf("llama", pre="brand-new")).notes
    assert "'brand-new'" in note


@pytest.mark.parametrize("broken", [False, True], ids=["absent", "merges that its tokens lack"])
def test_a_file_without_a_usable_tokenizer_is_refused(tmp_path, broken):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_block_count(1)
    if broken:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="its tokenizer cannot be loaded"):
        load_tokenizer(tmp_path / "a.gguf")
