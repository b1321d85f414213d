"""`coterie profile`: this device's compute backends, what they do with a model's layers, how they would share them."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.formatting import aligned, print_json
from coterie.cli.parser import Parser
from coterie.cli.worker import backend_names
from coterie.errors import UsageError
from coterie.units import counted, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from coterie.api import BackendsProfile
    from coterie.planner.head_allocation import HeadAllocation, PartAllocation
    from coterie.profiles.backend_profile import DeviceBackends, ShareTiming, Together


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "profile",
        help="time a model's layers on this machine's compute backends",
        description="Time one layer of a model on every compute backend of this machine (processor, OpenCL, WebGPU\n"
        "and others), for each number of attention heads and a grid of feed-forward neurons, forward and backward;\n"
        "and show how the backend scheduler would share the layer. Only the model's config is used.",
    )
    parser.add_argument("model", help="a model folder, GGUF file, or name on the Hugging Face hub")
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch (default 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a row (default 128)")
    parser.add_argument(
        "--method",
        choices=("full", "lora"),
        default="full",
        help="full: weights are trained, and so sent to a backend for each micro-batch; lora: they stay there",
    )
    parser.add_argument("--backends", default="auto", metavar="NAMES", help="names with + or commas between; auto: all")
    parser.add_argument(
        "--threads", type=int, default=1, help="processor threads that each backend may take (default 1)"
    )
    parser.add_argument("--again", action="store_true", help="measure even if an earlier measurement is kept")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the timings and the allocation as a PNG")
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, allocate, print."""
    for flag in ("rows", "tokens", "threads"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag} is {getattr(args, flag)}", hint=f"give --{flag} 1 or more")
    names = backend_names(args.backends)
    from coterie import api  # noqa: PLC0415 - imports torch: seconds, and a wrong flag should be told at once
    from coterie.metrics.rows_display import RowsDisplay  # noqa: PLC0415

    wish = api.ProfileWish(
        model=args.model,
        rows=args.rows,
        tokens=args.tokens,
        method=args.method,
        backends=None if names == ("auto",) else names,
        threads=args.threads,
        again=args.again,
    )
    display = RowsDisplay(sys.stderr, noun="measurements") if sys.stderr.isatty() and not args.json else None
    try:
        found = api.profile_compute(wish, None if display is None else lambda _, n, of: display.show("done", n - 1, of))
    finally:
        if display is not None:
            display.hide()
    if args.plot is not None:
        from coterie.cli.profile_plot import plot_profile  # noqa: PLC0415 - see cli.main

        plot_profile(found, args.plot)
    if args.json:
        print_json(found)
    else:
        print(_text(found, args.method))
        if args.plot is not None:
            print(f"\nplot: {args.plot}")
    return 0


def _text(found: "BackendsProfile", method: str) -> str:
    profile, shapes = found.profile, found.shapes
    size = f"micro-batches of {counted(profile.rows, 'row')} of {counted(profile.tokens, 'token')}, {method}"
    threads = max((backend.threads for backend in profile.backends), default=0)
    of = f", {counted(threads, 'thread')} of the processor for each backend" if threads else ""
    parts = [f"{found.model}: {counted(shapes.blocks, 'block')}, one measured; {size}{of}"]
    parts += list(shapes.notes)
    present = [
        (info.name, f"{info.device} ({info.kind}), {info.driver}", f"self-test {found.errors[info.name]:.1e}")
        for info in found.backends
    ]
    parts.append("\nbackends\n" + aligned(present))
    if found.absent:
        parts.append("\nabsent\n" + aligned(list(found.absent.items())))
    if profile.groups:
        title = "attention heads" if shapes.attention is None else _heads_title(shapes.attention.heads, profile.groups)
        columns = {backend.name: backend.attention for backend in profile.backends}
        parts.append(f"\n{title}, ms fused / head by head\n" + _table("KV groups", columns))
    if profile.neurons:
        columns = {backend.name: backend.neurons for backend in profile.backends}
        parts.append("\nfeed-forward neurons, ms\n" + _table("neurons", columns))
    beside = [(tried.part, _times(tried)) for tried in profile.together if tried.slowed]
    if beside:
        busier = any(times < 1 for tried in profile.together for times in tried.slowed.values())
        why = " (below 1: the machine was busier when they were measured alone)" if busier else ""
        parts.append(f"\nside by side, times as long as alone{why}\n" + aligned(beside))
    if profile.dealing_s and len(profile.backends) > 1:
        costs = [(part, f"{seconds * 1e3:.3g}") for part, seconds in profile.dealing_s.items()]
        parts.append(
            "\ndealing out and joining, ms a micro-batch and block, if several backends share\n" + aligned(costs)
        )
    notes = [(b.name, f"{part}: {note}") for b in profile.backends for part, note in b.notes.items()]
    if notes:
        parts.append("\nnot wholly measured\n" + aligned(notes))
    parts.append(f"\nallocation, of a micro-batch and block\n{_allocation(found.allocation, profile)}")
    return "\n".join(parts)


def _times(tried: "Together") -> str:
    return ", ".join(f"{name} {times:.2f}" for name, times in tried.slowed.items())


def _heads_title(heads: int, groups: int) -> str:
    of = "" if heads == groups else f" in {counted(groups, 'KV group')}"
    return f"{counted(heads, 'attention head')}{of}"


def _table(noun: str, columns: "Mapping[str, Sequence[ShareTiming]]") -> str:
    """A row for each count, a column for each backend."""
    counts = sorted({timing.count for timings in columns.values() for timing in timings})
    by_count = {name: {timing.count: timing for timing in timings} for name, timings in columns.items()}
    rows = [(noun, *columns)]
    rows += [(f"{count:,}", *(_cell(by_count[name].get(count)) for name in columns)) for count in counts]
    return aligned(rows)


def _cell(timing: "ShareTiming | None") -> str:
    if timing is None:
        return "–"
    each = "" if timing.each_s is None else f" / {timing.each_s * 1e3:.3g}"
    return f"{timing.fused_s * 1e3:.3g}{each}"


def _allocation(allocation: "HeadAllocation", profile: "DeviceBackends") -> str:
    rows: list[tuple[str, ...]] = []
    parts = [("heads", allocation.attention), ("neurons", allocation.neurons)]
    found = [(title, part) for title, part in parts if part is not None]
    for title, part in found:
        rows.append((title, _shares(part), _prediction(part.predicted_s, part.best_single_s, part.best_single)))
        rows += [("", f"without {name}", reason) for name, reason in part.left_out.items()]
    if len(found) > 1:
        both = sum(part.predicted_s for _, part in found)
        alone = {
            one.name: one.attention[-1].seconds + one.neurons[-1].seconds
            for one in profile.backends
            if one.attention[-1:] and one.attention[-1].count == profile.groups
            if one.neurons[-1:] and one.neurons[-1].count == profile.neurons
        }
        # Heads and neurons may have been measured on different ones, each failing at what the other can.
        name = min(alone, key=alone.__getitem__, default="")
        rows.append(("layer", "", _prediction(both, alone[name], name) if name else format_seconds(both)))
    return aligned(rows)


def _shares(part: "PartAllocation") -> str:
    return ", ".join(
        f"{share.backend} {share.count:,}{' one by one' if share.strategy == 'each' else ''}" for share in part.shares
    )


def _prediction(seconds: float, single_s: float, single: str) -> str:
    faster = single_s / seconds if seconds else 1.0
    return f"{format_seconds(seconds)}; {single} alone {format_seconds(single_s)}: {faster:.2f} times as fast"
