"""LoRA on SmolLM2-135M over three workers: one device's loss curve, and an adapter that plain PEFT loads.

Instructions with answers (self_instruct) from a GGUF file, dropout on. The same steps run again in this process, uncut.
The adapter folder is then put on transformers' own model by PEFT, and its logits on held-out rows are compared with
those of the run's last checkpoint in coterie's own model. Takes some four minutes of two quiet cores.

Figures: workers, steps, worst_loss_difference (relative, of a step), worst_logit_difference (largest absolute
difference over the largest logit), change_by_adapter (the same between the model with and without its adapter, to see
that the comparison can fail).
"""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from coterie import api
from coterie.checkpoint.names import checkpoint_folder
from coterie.checkpoint.store import CheckpointStore
from coterie.checkpoint.weights import CheckpointWeights
from coterie.config.loading import load_recipe
from coterie.config.recipe import LocalWorker
from coterie.coordinator.job import Job, prepare_job
from coterie.coordinator.one_device import largest_difference, run_on_one_device
from coterie.ids import RunId
from coterie.models import load_whole_model
from reporting import Report, parse_arguments
from task_runs import decoder_file
from task_settings import Sizes
from task_slices import ENVIRONMENT, make_slices, missing

TASK = "causal-lm"
WORKERS = tuple(LocalWorker(name=name) for name in ("a", "b", "c"))
MICRO_BATCHES = 2
STEPS, QUICK_STEPS = 30, 3
BATCH_ROWS = 2
COMPARED_ROWS = 8
SAME_LOSS, SAME_LOGITS = 1e-4, 1e-4


def train(model: Path, data: Path, folder: Path, steps: int) -> tuple[Job, api.FinetuneResult]:
    """The run over three workers, and its job."""
    slices = make_slices(TASK, data, folder / "rows", Sizes(train=steps * BATCH_ROWS, test=COMPARED_ROWS))
    recipe = load_recipe(
        None,
        {
            "model.name": str(model),
            "data.train": str(slices.train),
            "data.test": str(slices.test),
            "data.task": TASK,
            "method": "lora",
            "lora_dropout": 0.1,
            "max_steps": steps,
            "epochs": 1,
            "batch_rows": BATCH_ROWS,
            "micro_batches": MICRO_BATCHES,
            "learning_rate": 1e-3,
            # The output layer is as heavy as eight blocks.
            "cuts": (14, 27),
            "local_workers": WORKERS,
            "output": str(folder / "run"),
        },
    )
    return prepare_job(recipe, RunId("adapters"), lambda _text: None), api.train(recipe, api.QuietObserver())


def held_out(job: Job) -> list[Tensor]:
    """Token ids [1, T] of the test rows."""
    return [torch.as_tensor(row.input_ids, dtype=torch.long)[None] for row in job.splits["test"].rows]


@torch.no_grad()
def logits(model: nn.Module, rows: list[Tensor]) -> list[Tensor]:
    """[T, V] of each row."""
    model.eval()
    return [model(input_ids=row).logits[0] for row in rows]


def worst(got: list[Tensor], expected: list[Tensor]) -> float:
    """Largest absolute difference, of the largest expected value."""
    largest = max(float(row.abs().max()) for row in expected)
    return max(float((one - other).abs().max()) for one, other in zip(got, expected, strict=True)) / largest


def compare_logits(job: Job, result: api.FinetuneResult, model: Path) -> tuple[float, float]:
    """PEFT on transformers' model against the checkpoint in ours; and how much the adapter changes at all."""
    rows = held_out(job)
    checkpoint = CheckpointStore(checkpoint_folder(job.recipe.run.output)).latest()
    ours = logits(load_whole_model(job.spec, CheckpointWeights(checkpoint, job.weights)), rows)
    base = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    plain = logits(base, rows)
    adapted = logits(PeftModel.from_pretrained(base, result.model_folder), rows)
    return worst(adapted, ours), worst(adapted, plain)


def main() -> int:
    data_flag = ("--data", "FOLDER", f"a folder that holds the data set self_instruct (default: {ENVIRONMENT})")
    arguments = parse_arguments("LoRA over three workers against one device and plain PEFT.", values=(data_flag,))
    steps = QUICK_STEPS if arguments.quick else STEPS
    report = Report(
        "adapters",
        f"SmolLM2-135M from a GGUF file, LoRA with dropout, {BATCH_ROWS} rows a step, three local workers",
        arguments,
    )
    model = decoder_file()
    given = arguments.data or os.environ.get(ENVIRONMENT)
    data = Path(given) if given else None
    lacking = "the model is not installed (make install brings it)" if model is None else missing(TASK, data)
    if lacking or model is None or data is None:
        report.note(f"nothing is compared: {lacking}")
        return report.finish()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)  # PEFT's own
    with tempfile.TemporaryDirectory() as name:
        job, result = train(model, data, Path(name), steps)
        torch.set_num_threads(1)  # as a local worker has
        alone = run_on_one_device(job, MICRO_BATCHES, steps)
        logit_difference, change = compare_logits(job, result, model)
    shown = sorted({0, steps // 3, 2 * steps // 3, steps - 1})
    rows = [(step + 1, f"{result.losses[step]:.6f}", f"{alone.losses[step]:.6f}") for step in shown]
    report.table("losses", ("step", "three workers", "one device"), rows)
    report.figure("workers", len(result.plan.stages))
    report.figure("steps", len(result.losses))
    report.figure("worst_loss_difference", largest_difference(result.losses, alone.losses), at_most=SAME_LOSS)
    report.figure("worst_logit_difference", logit_difference, at_most=SAME_LOGITS)
    report.figure("change_by_adapter", change)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
