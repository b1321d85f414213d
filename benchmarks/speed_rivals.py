"""What coterie's speed is compared with, each in processes of its own: a plain PyTorch loop, and torch's pipelining.

    python speed_rivals.py '{"kind": "plain", "model": FOLDER, "method": "lora", "tokens": 128, "steps": 8}'

Prints one JSON line: seconds of each step after the first. `torch-1f1b` starts two processes that talk over gloo.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

ROWS, MICRO_BATCHES, LABELS = 8, 4, 9


def load(job: dict) -> nn.Module:
    """The whole model, embeddings frozen, adapters added under `lora`."""
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_pretrained(job["model"], num_labels=LABELS)
    if job["method"] == "lora":
        from peft import LoraConfig, get_peft_model

        wanted = ["query", "value"]
        model = get_peft_model(
            model, LoraConfig(r=8, lora_alpha=16, target_modules=wanted, modules_to_save=["classifier"])
        )
        model = model.base_model.model
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    return model.train()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, fused=True)


def batch(tokens: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 1000, (ROWS, tokens), generator=draw)
    return ids, torch.randint(0, LABELS, (ROWS, tokens), generator=draw)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.reshape(-1, LABELS), labels.reshape(-1))


def plain(job: dict) -> list[float]:
    """Gradient accumulation over the same micro-batches, one optimizer step, on one thread."""
    model = load(job)
    optimizer = optimizer_of(model)
    ids, labels = batch(job["tokens"])
    mask = torch.ones_like(ids)
    seconds = []
    size = ROWS // MICRO_BATCHES
    for _ in range(job["steps"] + 1):
        start = time.perf_counter()
        for first in range(0, ROWS, size):
            rows = slice(first, first + size)
            logits = model(input_ids=ids[rows], attention_mask=mask[rows]).logits
            (loss_of(logits, labels[rows]) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


class Half(nn.Module):
    """One of two stages: the embedding and half of the blocks, or the other half and the classifier."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        layers = model.bert.encoder.layer
        half = len(layers) // 2
        self.embeddings = model.bert.embeddings if rank == 0 else None
        self.layers = layers[:half] if rank == 0 else layers[half:]
        self.head = nn.Sequential(model.dropout, model.classifier) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embeddings(input_ids=x) if self.embeddings is not None else x
        for layer in self.layers:
            output = layer(hidden)
            hidden = output[0] if isinstance(output, tuple) else output
        return self.head(hidden) if self.head is not None else hidden


def torch_1f1b_rank(job: dict, rank: int) -> list[float]:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{job['rendezvous']}")
    stage = Half(load(job), rank)
    optimizer = optimizer_of(stage)
    ids, labels = batch(job["tokens"])
    schedule = Schedule1F1B(PipelineStage(stage, rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss_of)
    seconds = []
    for _ in range(job["steps"] + 1):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels, losses=[])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return seconds[1:]


def torch_1f1b(job: dict) -> list[float]:
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        shared = {**job, "kind": "torch-1f1b-rank", "rendezvous": str(Path(folder) / "store")}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, json.dumps({**shared, "rank": rank})],
                stdout=subprocess.PIPE,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in (0, 1)
        ]
        outputs = [process.communicate()[0] for process in ranks]
    return list(json.loads(outputs[0].splitlines()[-1]))


def main() -> int:
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    match job["kind"]:
        case "plain":
            seconds = plain(job)
        case "torch-1f1b":
            seconds = torch_1f1b(job)
        case _:
            seconds = torch_1f1b_rank(job, job["rank"])
    print(json.dumps(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
