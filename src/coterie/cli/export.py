"""`coterie export`: a model folder out of a run's checkpoint."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.formatting import print_json
from coterie.cli.parser import Parser
from coterie.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from coterie.checkpoint.reading import Checkpoint
    from coterie.checkpoint.store import CheckpointStore

FOLDER_HINT = "give the folder of a run, such as runs/latest"
DTYPES = ("float32", "bfloat16", "float16")
GGUF_DTYPES = (*DTYPES, "q8_0")


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "export",
        help="write a model folder from a run's checkpoint",
        description="Write a plain Hugging Face folder, or under LoRA a PEFT adapter folder, from a run's checkpoint:\n"
        "of a run that was interrupted, of an earlier step, merged, or in another type. A finished run has exported\n"
        "its last step to its folder `model` already. Without --overwrite, only such a folder is replaced.\n"
        "With --gguf: one file for llama.cpp and Ollama instead, with adapters merged (Llama, Mistral, Qwen2, Qwen3).",
    )
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to; default: a folder in the run's folder")
    parser.add_argument("--step", type=int, help="the checkpoint of this optimizer step; default: the last whole one")
    parser.add_argument("--base", metavar="MODEL", help="the pretrained model, if it is not where the run found it")
    parser.add_argument("--merge", action="store_true", help="under LoRA: a plain model with the adapters merged in")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="write a GGUF file instead of a folder")
    parser.add_argument(
        "--dtype",
        choices=GGUF_DTYPES,
        help="type of the saved weights (float32; in a GGUF file float16); q8_0, 8 bits, only in a GGUF file",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="take a folder's place whatever is in it (it is renamed to ….old)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Export and say where to."""
    if not args.folder.is_dir():
        raise CheckpointError(f"there is no folder {args.folder}", hint=FOLDER_HINT)
    _check_flags(args)
    from coterie.checkpoint.store import CheckpointStore  # noqa: PLC0415 - imports torch: seconds

    checkpoint = _chosen(CheckpointStore(args.folder / "checkpoints"), args)
    from coterie.models import open_model  # noqa: PLC0415 - as above
    from coterie.models.skeleton import config_of  # noqa: PLC0415 - as above
    from coterie.tasks.pad_token import LABELLING_CLASS, agree_on_pad  # noqa: PLC0415 - as above
    from coterie.tasks.tokenizer import load_tokenizer  # noqa: PLC0415 - as above

    if args.merge and checkpoint.manifest.terms.model.lora is None:
        raise UsageError("--merge is for runs with LoRA; this one trained the weights themselves", hint="drop --merge")
    source = open_model(args.base or checkpoint.manifest.base_model)
    tokenizer = load_tokenizer(source.path)
    if checkpoint.manifest.terms.model.auto_class == LABELLING_CLASS:
        agree_on_pad(tokenizer, config_of(checkpoint.manifest.terms.model).pad_token_id)
    if args.gguf is not None:
        from coterie.checkpoint.gguf_export import GgufOptions, export_gguf  # noqa: PLC0415 - as above

        file_options = GgufOptions(dtype=args.dtype or "float16", overwrite=args.overwrite)
        written = export_gguf(source, checkpoint, tokenizer.hf, args.gguf, file_options)
        kind, adapter, dtype = "a GGUF file", False, str(file_options.dtype)
    else:
        from coterie.checkpoint.export import ExportOptions, export_model  # noqa: PLC0415 - as above

        output = args.output or args.folder / _default_name(args)
        options = ExportOptions(merge=args.merge, dtype=args.dtype or "float32", overwrite=args.overwrite)
        written = export_model(source, checkpoint, tokenizer.hf, output, options)
        adapter = checkpoint.manifest.terms.model.lora is not None and not args.merge
        kind, dtype = "a PEFT adapter folder" if adapter else "a Hugging Face folder", str(options.dtype)
    if args.json:
        print_json({"model": str(written), "step": checkpoint.step, "adapter": adapter, "dtype": dtype})
        return 0
    print(f"step {checkpoint.step} exported to {written}: {kind}, {dtype}")
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    if args.gguf is None and args.dtype == "q8_0":
        raise UsageError("q8_0 is a type of GGUF files", hint="add --gguf FILE, or choose another type")
    if args.gguf is not None and args.output is not None:
        raise UsageError("--output is for folders, --gguf for a file", hint="give one of them")


def _chosen(store: "CheckpointStore", args: argparse.Namespace) -> "Checkpoint":
    steps = store.steps()
    if not steps:
        _refuse_side_run(args.folder)
        raise CheckpointError(f"{args.folder} holds no checkpoints", hint=FOLDER_HINT)
    if args.step is not None and args.step not in steps:
        raise CheckpointError(
            f"{args.folder} holds no checkpoint of step {args.step}; it has {', '.join(map(str, steps))}",
            hint="choose one of them, or leave --step out for the last",
        )
    checkpoint = store.latest() if args.step is None else store.open(args.step)
    assert checkpoint is not None, "there are steps, and damage raises"
    return checkpoint


def _refuse_side_run(folder: Path) -> None:
    """A side-tuning run has its parameters on the server until it ends, and a model folder from then on."""
    from coterie.coordinator.side_record import SIDE_RUN  # noqa: PLC0415 - only where it is needed

    if not (folder / SIDE_RUN).exists():
        return
    model = folder / "model"
    if model.exists():
        raise CheckpointError(
            f"{folder} is a side-tuning run: its side network is in {model} already",
            hint="use that folder as it is; --copy-backbone on `coterie train` puts the frozen model into it, too",
        )
    raise CheckpointError(
        f"{folder} is a side-tuning run that has not ended: what is trained is on its server",
        hint="`coterie train --resume` goes on and fetches it",
    )


def _default_name(args: argparse.Namespace) -> str:
    """`model` for what a finished run writes itself, another name for everything else."""
    parts = ["model"]
    if args.step is not None:
        parts.append(f"step-{args.step}")
    if args.merge:
        parts.append("merged")
    if args.dtype not in {None, "float32"}:
        parts.append(args.dtype)
    return "-".join(parts)
