"""`coterie predict` and `evaluate` with models that write: an answer to read, rows to keep, figures to compare."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import coterie
from coterie.checkpoint.export_record import ExportRecord, write_record
from coterie.errors import UsageError

WORDS = ("<pad>", "<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Summary:", "the")


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A random Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("writer") / "tiny-llama"
    torch.manual_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=48,
            eos_token_id=3,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), WORDS, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=48, **names).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "test.jsonl"
    rows = [{"dialogue": "a b c d", "summary": "a b"}, {"dialogue": "x y", "summary": "the x"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TASK = ("--task", "summarization", "--max-new-tokens", "5")


def test_a_text_on_the_command_line_gets_an_answer_to_read(told, writer):
    code, out, _ = told("predict", writer, *TASK, "--text", "a b c", "--text", "q r")
    assert code == 0
    assert out.strip().split("\n\n") == [
        text.strip() for text in coterie.generate(writer, ["a b c", "q r"], task="summarization", max_new_tokens=5)
    ]
    assert all(len(answer.split()) <= 5 for answer in out.split("\n\n"))


def test_rows_are_written_with_their_answers_and_compare_as_equal(answer, writer, dialogues, tmp_path):
    output = tmp_path / "answers.jsonl"
    code, found = answer("predict", writer, *TASK, "--data", dialogues, "--output", output)
    assert (code, found["rows"], found["predictions"]) == (0, 2, None)
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["dialogue"] for row in written] == ["a b c d", "x y"]
    assert all(row["summary"] for row in written)
    _, figures = answer("evaluate", writer, *TASK, "--data", output)
    assert figures["metrics"]["exact_match"] == 1.0


def test_an_evaluation_prints_loss_perplexity_and_rouge(told, writer, dialogues):
    code, out, _ = told("evaluate", writer, *TASK, "--data", dialogues)
    assert code == 0
    for word in ("perplexity", "ROUGE-1", "ROUGE-2", "ROUGE-L", "rouge_l", "loss"):
        assert word in out


def test_a_causal_model_is_compared_by_rouge_only_if_asked(answer, writer, tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"instruction": "a b", "output": "c d"}) + "\n")
    flags = ("--task", "causal-lm", "--max-new-tokens", "3", "--data", path)
    _, plain = answer("evaluate", writer, *flags)
    assert plain["metrics"].keys() == {"perplexity", "token_accuracy"}
    _, compared = answer("evaluate", writer, *flags, "--generate", "on")
    assert compared["metrics"]["rouge_l"] <= 1
    assert compared["details"]["perplexity"] == pytest.approx(plain["metrics"]["perplexity"])


def test_a_bare_text_is_put_as_the_model_learnt_to_be_asked(answer, writer, tmp_path):
    asked = tmp_path / "asked"
    shutil.copytree(writer, asked)
    record = ExportRecord(coterie="0", run_id="run", step=1, files=(), task="causal-lm", text_field="instruction")
    write_record(asked, record)
    flags = ("--max-new-tokens", "3", "--text", "a b c")
    _, answers = answer("predict", asked, *flags)
    assert answers["predictions"][0]["text"] == "a b c"
    assert answers["predictions"][0]["answer"]
    _, goes_on = answer("predict", writer, "--task", "causal-lm", *flags)
    assert goes_on["predictions"][0]["text"].startswith("a b c")
    assert "answer" not in goes_on["predictions"][0]


def test_a_prompt_on_the_command_line_is_put_around_a_bare_text(answer, writer):
    flags = ("--task", "causal-lm", "--max-new-tokens", "3", "--text", "b")
    _, asked = answer("predict", writer, *flags, "--prompt", "the a {text} Summary:")
    assert asked["predictions"][0]["text"] == "b"
    assert asked["predictions"][0]["answer"]


def test_a_model_that_tags_writes_no_text(tagger):
    with pytest.raises(UsageError, match="token-classification"):
        coterie.generate(tagger, ["Anna lives in Paris."])


def test_nonsense_settings_are_named(answer, writer):
    code, found = answer(
        "predict", writer, "--text", "a", "--temperature", "-1", "--top-p", "0", "--max-new-tokens", "0"
    )
    assert code != 0
    assert "3 mistakes" in found["error"]["message"]
