"""Side-tuning (Eco-MobiLLM) against its ablations and baselines on real data, with what each costs device and link.

Variants: `lora-local` and `bitfit-local` train the model on the device; `bitfit-split` has its middle blocks on the
server, two cuts, hidden states and gradients both ways; `mobillm` sends every token in every epoch to a side network;
`eco` sends only tokens that enter the loss (TS), once (TSTP: collect, then replay from the server's cache); `eco
without TS`, `eco without TSTP`, `neither` are its ablations. With the same side network `mobillm` is `neither`, so they
are one run in two rows. `bitfit-local` and `bitfit-split` are one run, too: a cut model computes what the whole does.

The device's frozen forward is the same for every variant, seed and epoch, so it runs once for each data set and is
counted for each variant as often as its device would have run it. Device compute: operations counted by row length,
padding included, and CPU seconds measured. Bytes: tensors as the wire has them, float16. Seconds: device, link and
server at the same time, the slowest counts; under `bitfit-split` one after the other; device and server are each a core
like this one. The target quality is half a point below the best mean of `neither`.

Figures: worst_quality_gap_points (mean of `eco` or an ablation against `neither`), device_passes (of `eco` as the
program runs it, over processes), upload_reduction (a batch padded to 256 tokens over a socket, all tokens against the
selected; the data set with the least; where one token is selected it is 256), device_compute_reduction (of `eco` to the
target against a device that runs in every epoch; the least), wire_over_counted_bytes (frames out of a socket, and those
of the program, against the formula; the most).

The data folder is that of `tasks.py`. All of it takes hours of one core, most of them for what is trained on the
device; `--only eco` and the ablations take minutes for a data set. With `--keep` it goes on where it was stopped, and
`--only-kept` shows what there is.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from coterie.coordinator.one_device import largest_difference
from coterie.units import MIB, format_bytes
from reporting import Report, parse_arguments
from sidetuning_bench import SetResult, Wish, run_set
from sidetuning_costs import VariantRun, epochs_to, final_spread, mean_curve
from sidetuning_jobs import left_out
from sidetuning_plots import plot_quality, plot_ranks, plot_speeds
from sidetuning_settings import SETTINGS, SIDE_VARIANTS, USUAL_RANK, VARIANTS, Variant, quick
from task_slices import ENVIRONMENT

ALLOWED_POINTS = 0.5
SHOWN_MBIT = 100.0
SEEDS = (0, 1, 2)


def show_set(report: Report, found: SetResult) -> None:
    """One table."""
    target = target_of(found)
    rows = [_row(found, variant, runs, target) for variant, runs in found.runs.items()]
    columns = (
        "",
        "points",
        "spread",
        "epochs",
        "device TFLOP",
        "device CPU s",
        "MB up",
        "MB down",
        "MB cache",
        "device MiB",
        f"s, {SHOWN_MBIT:g} Mbit/s",
        "to target",
    )
    sizes = found.setting.sizes
    report.table(
        f"{found.setting.name}: {found.facts.about}; {sizes.train} training rows, {found.facts.items} test rows; "
        f"quality: {found.setting.figure} in points, target {target:.1f}",
        columns,
        rows,
    )
    for note in found.notes:
        report.note(note)
    written = {variant: runs[0].rouge for variant, runs in found.runs.items() if runs[0].rouge}
    if written:
        names = tuple(next(iter(written.values())))
        cells = [(variant, *(f"{rouge[name]:.2f}" for name in names)) for variant, rouge in written.items()]
        report.table(f"{found.setting.name}: texts written after the first seed's run", ("", *names), cells)


def _row(found: SetResult, variant: str, runs: Sequence[VariantRun], target: float) -> tuple[object, ...]:
    curve, first = mean_curve(runs), runs[0]
    reached = epochs_to(curve, target)
    to_target = "never" if reached is None else f"{reached} ep, {first.seconds(SHOWN_MBIT * 1e6, reached):.0f} s"
    peak = found.peak_bytes.get(variant)
    return (
        variant,
        f"{curve[-1]:.2f}",
        f"{final_spread(runs):.2f} of {len(runs)}" if len(runs) > 1 else "one run",
        len(curve),
        f"{first.total('device_flops') / 1e12:.2f}",
        f"{first.total('device_cpu_s'):.0f}",
        f"{first.total('up_bytes') / 1e6:.1f}",
        f"{(first.total('down_bytes') + first.download_bytes) / 1e6:.1f}",
        f"{first.cache_bytes / 1e6:.1f}",
        "" if peak is None else f"{peak / MIB:.0f}",
        f"{first.seconds(SHOWN_MBIT * 1e6):.0f}",
        to_target,
    )


def target_of(found: SetResult) -> float:
    """The quality that time and compute are counted to."""
    runs = found.runs.get("neither") or found.runs.get("eco") or next(iter(found.runs.values()))
    return max(mean_curve(runs)) - ALLOWED_POINTS


def worst_gap(found: SetResult) -> float:
    """Largest difference between the mean of a side-tuning variant and that of `neither`, in points.

    A variant that ran with fewer seeds so far is compared on those.
    """
    gaps = []
    for variant in SIDE_VARIANTS:
        runs = found.runs.get(variant, ())
        seeds = {run.seed for run in runs}
        every = [run for run in found.runs["neither"] if run.seed in seeds]
        if every:
            same = [run for run in runs if run.seed in {one.seed for one in every}]
            gaps.append(abs(mean_curve(same)[-1] - mean_curve(every)[-1]))
    return max(gaps)


def compute_reduction(found: SetResult) -> float:
    """Device operations to the target in every epoch, over those of `eco`, which runs once."""
    every, once = found.runs["neither"][0], found.runs["eco"][0]
    reached = epochs_to(mean_curve(found.runs["neither"]), target_of(found))
    assert reached is not None, "the target is below the best mean"
    return sum(cost.device_flops for cost in every.costs[:reached]) / once.total("device_flops")


def show_sets(report: Report, results: Sequence[SetResult]) -> None:
    """What the figures are the worst of, set by set."""
    rows = []
    for found in results:
        if not _is_compared(found):
            continue
        every, target = found.runs["neither"], target_of(found)
        rows.append(
            (
                found.setting.name,
                f"{found.facts.items} / {found.facts.loss_items}",
                min(len(found.runs[variant]) for variant in SIDE_VARIANTS if variant in found.runs),
                f"{worst_gap(found):.2f}",
                f"{max(final_spread(found.runs[variant]) for variant in SIDE_VARIANTS if variant in found.runs):.2f}",
                f"{target:.1f}",
                epochs_to(mean_curve(every), target),
                f"{compute_reduction(found):.1f}",
                f"{_uploads(found):.1f}" if _uploads(found) else "",
            )
        )
    columns = (
        "",
        "test rows / items",
        "seeds",
        "gap",
        "spread of seeds",
        "target",
        "epochs to it",
        "less compute",
        "less sent",
    )
    report.table("side-tuning variants against `neither`, set by set; quality in points", columns, rows)


def _is_compared(found: SetResult) -> bool:
    return {"eco", "neither"} <= found.runs.keys()


def show_bytes(report: Report, results: Sequence[SetResult]) -> None:
    """Uploads of a batch, as the data are and padded."""
    rows = [
        (
            found.setting.name,
            f"{found.facts.row_tokens:.1f}",
            f"{found.facts.row_selected:.1f}",
            f"{_uploads(found):.1f}" if _uploads(found) else "",
            format_bytes(found.facts.padded_all.seen),
            format_bytes(found.facts.padded_selected.seen),
            f"{found.facts.padded_all.seen / found.facts.padded_selected.seen:.1f}",
            f"{found.facts.wire.seen / found.facts.wire.counted:.4f}",
        )
        for found in results
    ]
    columns = ("", "tokens", "selected", "less sent", "256 tokens", "selected", "less sent", "wire / counted")
    report.table("uploads: a row's tokens, the run's reduction, a batch padded to 256 on the wire", columns, rows)


def show_programs(report: Report, results: Sequence[SetResult]) -> None:
    """`eco` in this process beside `eco` over processes: one seed, the same order.

    Losses are compared in the first epoch; later the last bits have grown, and losses near 0 are compared.
    """
    rows = []
    for found in results:
        if found.program is None or "eco" not in found.runs:
            continue
        here = found.runs["eco"][0]
        rows.append(
            (
                found.setting.name,
                f"{here.curve[-1].points:.2f}",
                f"{found.program.points:.2f}",
                f"{largest_difference(here.losses[: here.batches], found.program.losses):.1e}",
                f"{found.program.device_passes:.2f}",
                format_bytes(found.program.counted),
                format_bytes(found.program.seen),
            )
        )
    columns = ("", "here", "program", "losses, epoch 1", "device passes", "counted", "in frames")
    report.table("eco in this process and as the program runs it, over processes; first seed", columns, rows)


def _uploads(found: SetResult) -> float:
    """Bytes of an epoch with all tokens, over those with the selected."""
    if "eco" not in found.runs or "eco without TS" not in found.runs:
        return 0.0
    return found.runs["eco without TS"][0].costs[0].up_bytes / found.runs["eco"][0].costs[0].up_bytes


def show_ranks(report: Report, found: SetResult) -> None:
    """Mean quality at the end by rank."""
    ranks = sorted({rank for by_rank in found.by_rank.values() for rank in by_rank})
    rows = [
        (variant, *(f"{by_rank[rank]:.2f}" if rank in by_rank else "" for rank in ranks))
        for variant, by_rank in found.by_rank.items()
    ]
    report.table(f"{found.setting.name}: {found.setting.figure} by rank", ("", *map(str, ranks)), rows)


def plot_set(found: SetResult, folder: Path) -> None:
    """Write a data set's plots."""
    folder.mkdir(parents=True, exist_ok=True)
    name = found.setting.name.replace(" ", "-")
    plot_speeds(found.setting.name, found.runs, folder / f"{name}-speeds.png")
    plot_quality(found.setting.name, found.runs, folder / f"{name}-quality.png", mbit=SHOWN_MBIT)
    if any(len(by_rank) > 1 for by_rank in found.by_rank.values()):
        plot_ranks(found.setting.name, found.by_rank, folder / f"{name}-ranks.png")


def add_figures(report: Report, results: Sequence[SetResult]) -> None:
    """The five figures, as far as what they compare was run."""
    compared = [found for found in results if _is_compared(found)]
    if compared:
        report.figure("worst_quality_gap_points", max(map(worst_gap, compared)), at_most=ALLOWED_POINTS, unit="points")
    programs = [found.program for found in results if found.program is not None]
    if programs:
        report.figure("device_passes", max(program.device_passes for program in programs), at_most=1)
    least = min(found.facts.padded_all.seen / found.facts.padded_selected.seen for found in results)
    report.figure("upload_reduction", least, unit="times")
    if compared:
        report.figure("device_compute_reduction", min(map(compute_reduction, compared)), at_least=5, unit="times")
    seen = [found.facts.wire.seen / found.facts.wire.counted for found in results]
    seen += [program.seen / program.counted for program in programs]
    report.figure("wire_over_counted_bytes", max(seen), at_most=1.02)


def main() -> int:
    arguments = parse_arguments(
        "Side-tuning against its ablations and baselines.",
        values=(
            ("--data", "FOLDER", f"a folder per data set (default: {ENVIRONMENT}, else what ships with coterie)"),
            ("--only", "VARIANTS", f"of {', '.join(VARIANTS)}; separated by commas"),
            ("--sets", "SETS", f"of {', '.join(setting.name for setting in SETTINGS)}; separated by commas"),
            ("--seeds", "SEEDS", f"default: {','.join(map(str, SEEDS))}"),
            ("--ranks", "RANKS", f"of the side network; default: {USUAL_RANK}; the paper's are 16,64,128,256"),
            ("--plot", "FOLDER", "draw each data set"),
            ("--keep", "FOLDER", "keep every run's result, and run nothing again that is kept there"),
        ),
        extra=(
            ("--only-kept", "run nothing: show what --keep has so far"),
            ("--no-peaks", "leave out the device's peak memory, a process for each variant"),
        ),
    )
    variants: tuple[Variant, ...] = _named(arguments.only, VARIANTS)
    names = _named(arguments.sets, tuple(setting.name for setting in SETTINGS))
    seeds = tuple(map(int, (arguments.seeds or ",".join(map(str, SEEDS))).split(",")))
    data = arguments.data or os.environ.get(ENVIRONMENT)
    wish = Wish(
        variants=variants,
        seeds=seeds[:1] if arguments.quick else seeds,
        ranks=tuple(map(int, (arguments.ranks or str(USUAL_RANK)).split(","))),
        is_quick=arguments.quick,
        data=Path(data) if data else None,
        keep=Path(arguments.keep) if arguments.keep else None,
        is_closed=arguments.only_kept,
        weighs=not arguments.quick and not arguments.no_peaks,
    )
    report = Report(
        "sidetuning",
        f"MiniLM and SmolLM2-135M frozen, a side network of rank {', '.join(map(str, wish.ranks))} beside them, "
        f"{len(wish.seeds)} seeds; and what is trained on the device",
        arguments,
    )
    results = []
    for setting in SETTINGS:
        reason = left_out(setting, wish.data) if setting.name in names else "not asked for"
        if reason is not None:
            report.note(f"left out: {setting.name}: {reason}")
            continue
        found = run_set(quick(setting) if arguments.quick else setting, wish, report.note)
        if found is None:
            report.note(f"left out: {setting.name}: nothing is kept of it")
            continue
        results.append(found)
        show_set(report, found)
        if any(len(by_rank) > 1 for by_rank in found.by_rank.values()):
            show_ranks(report, found)
        if arguments.plot:
            plot_set(found, Path(arguments.plot))
    if results:
        show_sets(report, results)
        show_bytes(report, results)
        show_programs(report, results)
        add_figures(report, results)
    return report.finish()


def _named(given: str | None, known: tuple[Variant, ...] | tuple[str, ...]) -> tuple[str, ...]:
    """Those of the known names that are given, all by default."""
    wanted = known if given is None else tuple(name.strip() for name in given.split(","))
    strange = sorted(set(wanted) - set(known))
    if strange:
        raise SystemExit(f"{strange[0]!r} is none of {', '.join(known)}")
    return tuple(name for name in known if name in wanted)


if __name__ == "__main__":
    sys.exit(main())
