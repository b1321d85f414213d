"""A comparison of ways in words and figures that a terminal can show, and as rows for tables and JSON."""

from collections.abc import Sequence

from coterie.planner.explain import Row
from coterie.planner.way import DeviceCost, Way, WaysRequest
from coterie.units import counted, format_bytes, format_seconds


def ways_table(ways: Sequence[Way]) -> list[Row]:
    """One row per way, in plain numbers (bytes, seconds, joules); None where a way does not fit."""
    return [
        {
            "way": way.name,
            "fits": way.fits,
            "reason": way.reason or None,
            "seconds": way.total_s if way.fits else None,
            "peak_bytes": way.peak_bytes if way.fits else None,
            "network_bytes": way.network_bytes if way.fits else None,
            "cache_bytes": way.cache_bytes if way.fits else None,
            "device_passes": way.device_passes if way.fits else None,
            "modelled_energy_j": way.energy_j if way.fits else None,
        }
        for way in ways
    ]


def explain_ways(ways: Sequence[Way], request: WaysRequest) -> str:
    """Say what each way takes, of whom, and who sees what."""
    data = request.data
    names = {device.worker: device.name for device in request.adapters.cluster.devices}
    title = f"Ways to fine-tune {request.adapters.model.name} on {counted(data.rows, 'row')}"
    tokens = f"{data.epoch.real} tokens, {data.epoch.selected} of them in the loss"
    where = f"data on {names[request.owner]}, server {names[request.server]}"
    lines = [
        f"{title} ({tokens}), {data.passes:.3g} times over them; {where}",
        "",
        *_grid([_HEADER, *(_summary(way) for way in ways)]),
    ]
    for way in ways:
        lines += ["", way.name]
        if not way.fits:
            lines.append(f"  does not fit: {way.reason}")
            continue
        lines.append(f"  {format_seconds(way.total_s)} = {_spans(way)}")
        lines += [f"  {line}" for line in _grid([_DEVICE_HEADER, *(_device(device) for device in way.devices)])]
        if way.cache_bytes:
            where = "memory" if request.cache_in_memory else "disk"
            lines.append(f"  cache of {format_bytes(way.cache_bytes)} in the server's {where}")
        lines += [f"  seen by {sentence}" for sentence in way.exposes]
    lines += ["", _verdict(ways), _FINE_PRINT]
    return "\n".join(lines)


_HEADER = ["way", "time", "fullest device", "over the network", "passes of the devices", "energy (modelled)"]
_DEVICE_HEADER = ["device", "does", "peak", "limit", "computes", "sends", "receives", "energy (modelled)"]
_FINE_PRINT = (
    "Predicted from profiles. Energy is modelled: stated watts (--device …,watts=…,network_watts=…) times the seconds "
    "computed and sent; nothing is measured."
)


def _summary(way: Way) -> list[str]:
    if not way.fits:
        return [way.name, "does not fit", "", "", "", ""]
    return [
        way.name,
        format_seconds(way.total_s),
        format_bytes(way.peak_bytes),
        format_bytes(way.network_bytes),
        f"{way.device_passes:.3g}",
        _energy(way.energy_j),
    ]


def _device(device: DeviceCost) -> list[str]:
    return [
        device.device_name,
        device.does,
        format_bytes(device.peak_bytes) if device.peak_bytes else "",
        format_bytes(device.limit_bytes),
        format_seconds(device.compute_s),
        format_bytes(device.sent_bytes),
        format_bytes(device.received_bytes),
        _energy(device.energy_j),
    ]


def _spans(way: Way) -> str:
    return " + ".join(f"{span.name} {format_seconds(span.seconds)}" for span in way.spans)


def _energy(joules: float) -> str:
    return f"{joules:.3g} J" if joules < 3600 else f"{joules / 3600:.3g} Wh"


def _verdict(ways: Sequence[Way]) -> str:
    fitting = [way for way in ways if way.fits]
    if not fitting:
        return "None of these ways fits."
    fastest = min(fitting, key=lambda way: way.total_s)
    leanest = min(fitting, key=lambda way: way.peak_bytes)
    quietest = min(fitting, key=lambda way: way.network_bytes)
    frugal = min(fitting, key=lambda way: way.energy_j)
    return (
        f"Fastest: {fastest.name}. Least memory on the fullest device: {leanest.name}. "
        f"Fewest bytes: {quietest.name}. Least energy (modelled): {frugal.name}."
    )


def _grid(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
