"""The server's memory as the planner counts it, and as a step of its trainer really takes it."""

import pytest
import torch
import transformers
from transformers import AutoConfig

from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.jobs.side_spec import SideSpec
from coterie.measure.live_bytes import LiveBytes
from coterie.models import FolderWeights, open_model
from coterie.planner.memory import LINK_COPIES, RUNTIME_BYTES
from coterie.planner.side_bytes import Backbone, TokenCounts
from coterie.planner.side_memory import PIECE_ELEMENTS, server_memory
from coterie.planner.way import RunData
from coterie.profiles.model_profile import AffineBytes, LayerProfile
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.backbone import make_backbone_spec
from coterie.sidetuning.side_model import build_side_model
from coterie.sidetuning.trainer import SideTrainer
from coterie.tasks.catalog import get_task

ROWS, BLOCKS, WIDTH = 4, 6, 192
BERT = {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "intermediate_size": 64}
LLAMA = {**BERT, "num_key_value_heads": 2, "tie_word_embeddings": True}
MODELS = {
    "tags": ("token-classification", "AutoModelForTokenClassification", "bert", {**BERT, "vocab_size": 50}),
    "text": ("causal-lm", "AutoModelForCausalLM", "llama", {**LLAMA, "vocab_size": 8000}),
}


def trainer_of(model, side, folder):
    task, auto_class, kind, settings = MODELS[model]
    config = AutoConfig.for_model(kind, num_labels=5, **settings)
    getattr(transformers, auto_class).from_config(config).save_pretrained(folder)
    source = open_model(folder)
    spec = make_backbone_spec(source, auto_class=auto_class, seed=0)
    built = build_side_model(spec, side, FolderWeights(source, spec))
    return SideTrainer(built, get_task(task), OptimizerSpec(learning_rate=1e-3, total_samples=100))


def batch_of(side, tokens, read):
    """`tokens` of each row sent, `read` of them in the loss."""
    layers = tuple(range(side.first_layer, BLOCKS + 1))
    index = torch.cat([torch.arange(read) + row * tokens for row in range(ROWS)])
    return ActivationBatch(
        samples=torch.arange(ROWS),
        counts=torch.full((ROWS,), tokens),
        layers=layers,
        taps=torch.randn(ROWS * tokens, len(layers), WIDTH),
        labels=torch.randint(0, 5, (ROWS * read,)),
        loss_index=None if side.selects_tokens else index,
    )


def output_layer(parameter_bytes):
    nothing = AffineBytes()
    return LayerProfile(
        name="output layer",
        kind="output layer",
        parameter_bytes=parameter_bytes,
        trainable_bytes=0,
        largest_trainable_bytes=0,
        saved=nothing,
        boundary=nothing,
        transient=nothing,
        forward_flops_per_row=0.0,
        backward_flops_per_row=0.0,
    )


def predicted(trainer, side, tokens, read):
    """What `server_memory` says of a model that has an output layer of this size, and of steps like this one."""
    output = output_layer(sum(parameter.nbytes for parameter in trainer.model.output.parameters().values()))
    sent = TokenCounts(padded=ROWS * tokens, real=ROWS * tokens, selected=ROWS * read)
    data = RunData(
        rows=ROWS,
        epoch=sent,
        largest=sent,
        steps_per_epoch=1,
        steps=1,
        task_bytes=sum(parameter.nbytes for parameter in trainer.model.output.trainable().values()),
    )
    return server_memory(output, Backbone(blocks=BLOCKS, width=WIDTH), side, data, optimizer_copies=2)


@pytest.mark.parametrize(
    ("model", "tokens", "read", "options"),
    [
        ("tags", 128, 128, {}),
        ("tags", 128, 16, {"selects_tokens": False}),
        ("tags", 128, 128, {"first_layer": 4, "rank": 16}),
        ("text", 48, 48, {}),
        ("text", 64, 16, {"selects_tokens": False}),
    ],
)
def test_a_step_takes_the_memory_that_the_planner_counts(tmp_path, model, tokens, read, options):
    side = SideSpec(**options)
    trainer = trainer_of(model, side, tmp_path)
    trainer.step(batch_of(side, tokens, read), 0)  # the optimizer's state is there from now on
    with LiveBytes() as live:
        live.ignore([*trainer.model.parameters().values(), *trainer.model.output.parameters().values()])
        batch = batch_of(side, tokens, read)
        trainer.step(batch, ROWS)
    parts = predicted(trainer, side, tokens, read)
    assert parts["activations"] + parts["gradients"] == pytest.approx(live.peak_bytes, rel=0.15)
    held = sum(parameter.nbytes for parameter in trainer.model.parameters().values())
    assert parts["gradients"] == held
    assert parts["optimizer"] == 2 * held
    assert parts["weights"] >= held
    state = sum(tensor.nbytes for name, tensor in trainer.state().items() if name.startswith("optimizer/"))
    assert state == pytest.approx(parts["optimizer"], rel=0.01)
    assert parts["buffers"] == LINK_COPIES * batch.taps.nbytes + RUNTIME_BYTES


def test_a_step_of_many_tokens_is_worked_on_in_pieces():
    side, backbone = SideSpec(), Backbone(blocks=BLOCKS, width=WIDTH)

    def activations(tokens):
        sent = TokenCounts(padded=tokens, real=tokens, selected=tokens)
        data = RunData(rows=1, epoch=sent, largest=sent, steps_per_epoch=1, steps=1)
        return server_memory(output_layer(0), backbone, side, data, optimizer_copies=2)["activations"]

    piece = PIECE_ELEMENTS // (BLOCKS * WIDTH)
    arrived = 4 * BLOCKS * WIDTH
    assert activations(3 * piece) - activations(2 * piece) == piece * arrived
    assert activations(piece) - activations(piece // 2) > 2 * (piece - piece // 2) * arrived
