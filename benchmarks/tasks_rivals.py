"""What coterie's fine-tunes are compared with: a plain loop over a whole transformers or PEFT model.

    python tasks_rivals.py JOB.json

A process of its own in which nothing of coterie is used: rows are read, encoded and padded here, the loss is the
model's own (the mean over the batch's labels), each batch is one forward and one backward. Prints one JSON line:
`{"losses": […], "untrained": {…}, "quality": {…}, "items": 1060}`.

Keys of a job: `task`, `model` (folder or GGUF file), `labels` (null: those of the data), `train`, `test` (files),
`steps`, `batch_rows`, `learning_rate`, `warmup_steps`, `dropout` (of the adapters; null: none at all, also not the
model's own), `seed`, and either `order` (rows of each step) with `initial` (a safetensors file: new layers and
adapters), or null for both: its own order and start. Without `test` nothing is evaluated; `untrained` says whether to
do it before training, too.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
CLASSES = {
    "token-classification": "AutoModelForTokenClassification",
    "sequence-classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "summarization": "AutoModelForCausalLM",
}
Row = tuple[list[int], list[int], list[int] | float]
"""Ids, token types (empty where there are none), and labels: one per token, or one number."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """JSON Lines, or sentences of two tab-separated columns with empty lines between them."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    rows = []
    for block in text.strip().split("\n\n"):
        words, tags = zip(*(line.split("\t") for line in block.split("\n")), strict=True)
        rows.append({"words": list(words), "tags": list(tags)})
    return rows


def labels_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """All labels or tags of the training rows, sorted; none in tasks without."""
    return sorted({label for row in rows for label in [row.get("label"), *row.get("tags", [])] if label is not None})


def load_tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    if model.suffix != ".gguf":
        return AutoTokenizer.from_pretrained(model)
    from tokenizers import pre_tokenizers

    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    # transformers forgets this half of how SmolLM2 was trained when it reads a GGUF file.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def encode(row: dict[str, Any], job: dict[str, Any], tokenizer: Any) -> Row:
    match job["task"]:
        case "token-classification":
            return encode_words(row, job["labels"], tokenizer)
        case "causal-lm":
            asked = row["instruction"] + ("\n\n" + row["input"] if row["input"] else "")
            return encode_answer(asked, row["output"], tokenizer)
        case "summarization":
            asked = "Summarize the following dialogue.\n\n" + row["dialogue"]
            return encode_answer(asked, row["summary"], tokenizer)
    encoded = tokenizer(row["text"], row.get("text_pair"))
    answer = float(row["score"]) if job["task"] == "regression" else job["labels"].index(row["label"])
    return encoded["input_ids"], encoded["token_type_ids"], answer


def encode_words(row: dict[str, Any], labels: Sequence[str], tokenizer: Any) -> Row:
    """The first piece of each word has its label."""
    encoded = tokenizer(row["words"], is_split_into_words=True)
    wanted: list[int] = []
    before = None
    for word in encoded.word_ids():
        wanted.append(IGNORED if word is None or word == before else labels.index(row["tags"][word]))
        before = word
    return encoded["input_ids"], encoded["token_type_ids"], wanted


def encode_answer(asked: str, answer: str, tokenizer: Any) -> Row:
    """A question by the chat template; labels, which the model shifts itself, on the answer and the end of its turn."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True
    )
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    learnt = tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return before + learnt, [], [IGNORED] * len(before) + learnt


def collate(rows: Sequence[Row], pad: int) -> dict[str, Tensor]:
    width = max(len(ids) for ids, _, _ in rows)

    def padded(values: Sequence[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*value, *[fill] * (width - len(value))] for value in values])

    batch = {
        "input_ids": padded([ids for ids, _, _ in rows], pad),
        "attention_mask": padded([[1] * len(ids) for ids, _, _ in rows], 0),
    }
    if rows[0][1]:
        batch["token_type_ids"] = padded([types for _, types, _ in rows], 0)
    answers = [answer for _, _, answer in rows]
    batch["labels"] = padded(answers, IGNORED) if isinstance(answers[0], list) else torch.tensor(answers)
    return batch


def load_model(job: dict[str, Any]) -> Any:
    """A small encoder is trained whole, a causal model by adapters."""
    import transformers

    torch.manual_seed(job["seed"])
    path, found = Path(job["model"]), getattr(transformers, CLASSES[job["task"]])
    if "CausalLM" not in CLASSES[job["task"]]:
        settings = {"num_labels": max(len(job["labels"]), 1)}
        if job["task"] != "token-classification":
            settings["problem_type"] = "regression" if job["task"] == "regression" else "single_label_classification"
        model = found.from_pretrained(path, **settings)
        put_initial(model, job["initial"])
        return model
    from peft import LoraConfig, get_peft_model

    model = found.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.config.use_cache = False
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        lora_dropout=job["dropout"] or 0.0,
        target_modules=["q_proj", "v_proj"],
    )
    model = get_peft_model(model, adapters)
    put_initial(model, job["initial"])
    return model


def put_initial(model: Any, file: str | None) -> None:
    """Given starting values; of adapters they have the names of PEFT's files."""
    if file is None:
        return
    from safetensors.torch import load_file

    given = load_file(file)
    if hasattr(model, "peft_config"):
        from peft import set_peft_model_state_dict

        given = {f"base_model.model.{name}": tensor for name, tensor in given.items()}
        unexpected = set_peft_model_state_dict(model, given).unexpected_keys
    else:
        unexpected = model.load_state_dict(given, strict=False).unexpected_keys
    if unexpected:
        raise SystemExit(f"no such parameters: {unexpected}")


def make_optimizer(model: Any, job: dict[str, Any]) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW without decay of biases and norms; the rate rises and falls linearly."""
    from transformers import get_linear_schedule_with_warmup

    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    plain = [parameter for name, parameter in trained.items() if name.endswith(".bias") or "norm" in name.lower()]
    decayed = [parameter for parameter in trained.values() if not any(parameter is other for other in plain)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=job["learning_rate"])
    return optimizer, get_linear_schedule_with_warmup(optimizer, job["warmup_steps"], job["steps"])


def own_order(count: int, job: dict[str, Any]) -> Iterator[list[int]]:
    """Every epoch in a new random order."""
    draw = torch.Generator().manual_seed(job["seed"])
    while True:
        order = torch.randperm(count, generator=draw).tolist()
        yield from (order[start : start + job["batch_rows"]] for start in range(0, count, job["batch_rows"]))


def train(model: Any, rows: Sequence[Row], pad: int, job: dict[str, Any]) -> list[float]:
    """The loss of each step."""
    model.train(job["dropout"] is not None)  # nothing but dropout tells training from evaluation in these models
    optimizer, schedule = make_optimizer(model, job)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    order = iter(job["order"]) if job["order"] else own_order(len(rows), job)
    losses = []
    for _ in range(job["steps"]):
        loss = model(**collate([rows[index] for index in next(order)], pad)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluate(model: Any, rows: Sequence[Row], pad: int, job: dict[str, Any]) -> tuple[dict[str, float], int]:
    """Figures in percent and the mean loss, and over how many items."""
    model.eval()
    loss, right, answered = 0.0, [], []
    order = sorted(range(len(rows)), key=lambda index: len(rows[index][0]))
    for start in range(0, len(order), 8):
        batch = collate([rows[index] for index in order[start : start + 8]], pad)
        out = model(**batch)
        logits, labels = out.logits, batch["labels"]
        if "CausalLM" in CLASSES[job["task"]]:
            logits, labels = logits[:, :-1], labels[:, 1:]
        kept = labels != IGNORED
        loss += out.loss.item() * int(kept.sum())
        found = logits.reshape(labels.shape) if job["task"] == "regression" else logits.argmax(dim=-1)
        right += [values[mask].tolist() for values, mask in zip(labels, kept, strict=True)]
        answered += [values[mask].tolist() for values, mask in zip(found, kept, strict=True)]
    items = sum(len(row) if isinstance(row, list) else 1 for row in right)
    return {**figures(right, answered, job), "loss": loss / items}, items


def figures(right: list[Any], answered: list[Any], job: dict[str, Any]) -> dict[str, float]:
    if job["task"] == "token-classification":
        from seqeval.metrics import f1_score

        names = [[[job["labels"][index] for index in row] for row in rows] for rows in (right, answered)]
        return {"entity_f1": 100 * float(f1_score(*names))}
    flat = [[item for row in rows for item in (row if isinstance(row, list) else [row])] for rows in (right, answered)]
    if job["task"] == "regression":
        from scipy import stats

        return {name: 100 * float(getattr(stats, f"{name}r")(*flat).statistic) for name in ("spearman", "pearson")}
    accuracy = 100 * sum(one == other for one, other in zip(*flat, strict=True)) / len(flat[0])
    return {"token_accuracy" if "CausalLM" in CLASSES[job["task"]] else "accuracy": accuracy}


def main() -> int:
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(Path(job["model"]))
    read = {split: read_rows(Path(job[split])) for split in ("train", "test") if job[split]}
    job["labels"] = job["labels"] or labels_of(read["train"])
    rows = {split: [encode(row, job, tokenizer) for row in found] for split, found in read.items()}
    model, pad = load_model(job), tokenizer.pad_token_id
    result: dict[str, Any] = {"items": 0}
    if job["untrained"]:
        result["untrained"], _ = evaluate(model, rows["test"], pad, job)
    result["losses"] = train(model, rows["train"], pad, job)
    if "test" in rows:
        result["quality"], result["items"] = evaluate(model, rows["test"], pad, job)
    if any(not math.isfinite(loss) for loss in result["losses"]):
        raise SystemExit("a loss is not finite")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
