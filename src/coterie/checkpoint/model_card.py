"""The README of an exported folder: what was trained, on what, how, and how to load it."""

import msgspec

from coterie import __version__
from coterie.checkpoint.manifest import Manifest
from coterie.jobs.model_folder import GGUF


class CardFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What only the caller knows about the run.

    Attributes:
        data: What it was trained on, in words: a file, a data set's name.
        task: Such as `token-classification`, as recipes name it; by default what the checkpoint says.
        metrics: Quality on which data, such as `{"test entity F1": 0.72}`.
    """

    data: str = ""
    task: str = ""
    metrics: dict[str, float] = {}


_PIPELINE_TAG_OF_TASK = {
    "token-classification": "token-classification",
    "sequence-classification": "text-classification",
    "regression": "text-classification",
    "causal-lm": "text-generation",
    "summarization": "summarization",
}
"""What the Hugging Face hub calls our tasks."""

_PIPELINE_TAG_OF_CLASS = {
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForCausalLM": "text-generation",
}


def model_card(manifest: Manifest, facts: CardFacts, *, base_name: str, adapter: bool) -> str:
    """The Markdown text, with the header that the Hugging Face hub reads."""
    terms = manifest.terms
    task = facts.task or terms.task
    tag = _PIPELINE_TAG_OF_TASK.get(task) or _PIPELINE_TAG_OF_CLASS.get(terms.model.auto_class)
    header = ["---", f"base_model: {_quoted(base_name)}", f"library_name: {'peft' if adapter else 'transformers'}"]
    if tag:
        header.append(f"pipeline_tag: {tag}")
    header += ["tags:", "- coterie", *(["- lora"] if terms.model.lora is not None else []), "---"]
    optimizer = terms.optimizer
    rows = [
        ("base model", base_name),
        ("task", task or "not recorded"),
        *([("prompt", terms.prompt)] if terms.prompt else []),
        ("trained on", facts.data or "not recorded"),
        ("method", _method(manifest)),
        ("optimizer steps", f"{manifest.global_step} of {terms.batch_rows} rows, {manifest.samples_seen} rows in all"),
        ("optimizer", f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, {optimizer.lr_schedule}"),
        ("schedule", f"{terms.schedule}, {terms.micro_batches} micro-batches"),
        ("seed", str(terms.seed)),
        ("last loss", f"{manifest.loss_tail[-1]:.4f}" if manifest.loss_tail else "not recorded"),
        *((name, f"{value:.4g}") for name, value in sorted(facts.metrics.items())),
        ("written by", ", ".join(f"{k} {v}" for k, v in {"coterie": __version__, **manifest.libraries}.items())),
    ]
    table = ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)]
    usage = _adapter_usage(terms.model.auto_class, base_name) if adapter else _usage(terms.model.auto_class)
    title = f"# {_cell(_title(base_name))}, fine-tuned"
    return "\n".join([*header, "", title, "", *table, "", "```python", *usage, "```", ""])


def _title(base_name: str) -> str:
    """What people call the base model: the end of its name, or of its folder's path unless that says nothing."""
    parts = [part for part in base_name.split("/") if part]
    return next((part for part in reversed(parts) if part != "model"), base_name)


def _method(manifest: Manifest) -> str:
    model = manifest.terms.model
    if model.lora is not None:
        name = {"lora": "LoRA", "rslora": "rsLoRA", "dora": "DoRA"}[model.lora.variant]
        held = "" if model.frozen_dtype == "float32" else f", frozen weights held in {model.frozen_dtype}"
        return f"{name}, rank {model.lora.rank}, alpha {model.lora.alpha}{held}"
    if model.method == "bitfit":
        return "BitFit: biases and task layers"
    if model.method == "head":
        return "task layers only"
    return f"full fine-tuning, {len(model.frozen)} parameters frozen" if model.frozen else "full fine-tuning"


def _usage(auto_class: str) -> list[str]:
    return [
        f"from transformers import {auto_class}, AutoTokenizer",
        "",
        f'model = {auto_class}.from_pretrained("path/to/this/folder")',
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
    ]


def _adapter_usage(auto_class: str, base_name: str) -> list[str]:
    base = repr(base_name)
    if base_name.endswith(GGUF):
        folder, _, file = base_name.rpartition("/")
        base = f'{folder or "."!r}, gguf_file={file!r}, dtype="float32"'
    return [
        "from peft import PeftModel",
        f"from transformers import AutoConfig, {auto_class}, AutoTokenizer",
        "",
        'folder = "path/to/this/folder"',
        f"base = {auto_class}.from_pretrained({base}, config=AutoConfig.from_pretrained(folder))",
        "model = PeftModel.from_pretrained(base, folder)",
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
    ]


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()  # a JSON string is a YAML string


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
