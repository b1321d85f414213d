"""The README of a folder with a side network: what it is, and how plain transformers loads and uses it."""

from collections.abc import Mapping

import msgspec

from coterie import __version__
from coterie.checkpoint.export_record import ExportRecord
from coterie.jobs.side_folder import BACKBONE, FIRST_TASK_LAYERS, SIDE_NETWORK, TASK_LAYERS, SideConfig
from coterie.models.stubs import StubForm


def side_card(
    config: SideConfig,
    *,
    stub_form: StubForm,
    task_layers: bool,
    record: ExportRecord,
    metrics: Mapping[str, float],
) -> str:
    """The Markdown text, with the header that the Hugging Face hub reads.

    Args:
        config: Of the folder.
        stub_form: What the model's blocks return.
        task_layers: There is a file with layers trained beside the side network.
        record: Which run and task.
        metrics: Quality by name.
    """
    name = "the folder `backbone` in here" if config.backbone == BACKBONE else config.backbone
    side = config.side
    mode = ", trained on prediction differences (additive mode)" if side.mode == "additive" else ""
    rows = [
        ("backbone", f"{name}, unchanged"),
        ("task", record.task or "not recorded"),
        (
            "side network",
            f"rank {side.rank} on layers {side.first_layer} to {config.layers} of width {config.width}{mode}",
        ),
        ("optimizer steps", str(record.step)),
        *((metric, f"{value:.4g}") for metric, value in sorted(metrics.items())),
        ("written by", f"coterie {__version__}"),
    ]
    table = "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)])
    code = "\n".join(usage(config, stub_form=stub_form, task_layers=task_layers))
    return (
        "---\nlibrary_name: transformers\ntags:\n- coterie\n- side-tuning\n---\n\n# A side network\n\n"
        "It reads what every block of a frozen model says of a token, and adds its own to the last one's. "
        f"To use it, coterie is not needed:\n\n```python\n{code}\n```\n\n{table}\n"
    )


def usage(config: SideConfig, *, stub_form: StubForm, task_layers: bool) -> list[str]:
    """Lines of Python that load backbone and side network, by torch, safetensors and transformers alone.

    Args:
        config: Of the folder.
        stub_form: What the model's blocks return.
        task_layers: There is a file with layers trained beside the side network.
    """
    side, first = config.side, config.side.first_layer
    place = f'f"{{folder}}/{BACKBONE}"' if config.backbone == BACKBONE else _quoted(config.backbone)
    gguf = f", gguf_file={_quoted(config.gguf_file)}" if config.gguf_file else ""
    load = [f'model.load_state_dict(load_file(f"{{folder}}/{TASK_LAYERS}"), strict=False)'] if task_layers else []
    blocks = f"enumerate(model.{config.blocks}, 1)"
    tapped = f"list({blocks})[{first - 1}:]" if first > 1 else blocks
    hidden = "climb(layer, output)" if stub_form == "tensor" else "(climb(layer, output[0]), *output[1:])"
    return [
        "from safetensors.torch import load_file",
        "from torch.nn.functional import gelu, layer_norm",
        f"from transformers import AutoConfig, {config.auto_class}, AutoTokenizer",
        "",
        'folder = "path/to/this/folder"',
        "config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)",
        f'model = {config.auto_class}.from_pretrained({place}{gguf}, config=config, dtype="float32").eval()',
        *load,
        f'net = load_file(f"{{folder}}/{SIDE_NETWORK}")',
        "",
        "def climb(layer, h):",
        f'    z = h if layer == {first} else h.lerp(climb.s, (net[f"gates.{{layer}}"] / {side.temperature}).sigmoid())',
        '    n = layer_norm(z, z.shape[-1:], net[f"norms.{layer}.weight"], net[f"norms.{layer}.bias"])',
        '    climb.s = z + gelu(n @ net[f"down.{layer}.weight"].T) @ net[f"up.{layer}.weight"].T',
        f'    return h + climb.s * net["output_gate"] / {side.temperature} if layer == {config.layers} else h',
        "",
        f"for layer, block in {tapped}:",
        f"    block.register_forward_hook(lambda _block, _inputs, output, layer=layer: {hidden})",
        *(_additive_usage(task_layers=task_layers) if side.mode == "additive" else ()),
    ]


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()  # a JSON string is a Python string


def _additive_usage(*, task_layers: bool) -> list[str]:
    """Lines that make the answer of what the backbone alone says and of what it says with the side network."""
    swap = '        model.load_state_dict(load_file(f"{folder}/{name}"), strict=False)'
    return [
        "",
        "def answer(**inputs):  # probabilities, of a regression scores",
        '    gate, logits = net["output_gate"], []',
        f'    for name, net["output_gate"] in (("{FIRST_TASK_LAYERS}", 0 * gate), ("{TASK_LAYERS}", gate)):',
        *([swap] if task_layers else []),
        "        logits.append(model(**inputs).logits)",
        "    before, after = logits",
        "    return (before if before.shape[-1] == 1 else before.softmax(-1)) + after - before",
    ]
