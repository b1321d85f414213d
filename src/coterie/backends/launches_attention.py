"""Attention heads as kernel launches on an engine: forward, and the backward written out.

Queries lie as [B,T,H,d], keys and values as [B,T,G,d]; what is between the projections is in `launches_mixing`.
"""

from collections.abc import Mapping

import msgspec

from coterie.backends.engine import Buffer, Engine, Heads, Positions
from coterie.backends.launches_mixing import mix_heads, mix_heads_gradient
from coterie.backends.launches_products import (
    add_array,
    input_gradient,
    part_of_output,
    product_of_rows,
    project,
    weight_gradient,
)
from coterie.backends.shares import Array, AttentionInputs, AttentionShape, Gradients, Need, Outputs


class SavedHeads(msgspec.Struct, kw_only=True, eq=False):
    """What a forward keeps, on the device.

    Attributes:
        x: [B,T,D].
        heads: Queries and keys turned, probabilities before dropout.
        inner: [B,T,H d].
        positions: What queries and keys were turned by.
        added: Names of what was added to projections.
    """

    x: Buffer
    heads: Heads
    inner: Buffer
    positions: Positions | None
    added: tuple[str, ...]

    def buffers(self) -> list[Buffer]:
        """All that is held."""
        heads = self.heads
        held = [self.x, heads.q, heads.k, heads.v, heads.probabilities, self.inner]
        if heads.keep is not None:
            held.append(heads.keep)
        if self.positions is not None:
            held += [self.positions.cos, self.positions.sin]
        return held


def _widths(shape: AttentionShape) -> dict[str, int]:
    grouped = shape.groups * shape.head_dim
    return {"q": shape.heads * shape.head_dim, "k": grouped, "v": grouped}


def _upload_positions(engine: Engine, shape: AttentionShape, inputs: AttentionInputs) -> Positions | None:
    if shape.rotary == "none":
        return None
    assert inputs.cos is not None, "rotary positions need cosines"
    assert inputs.sin is not None, "rotary positions need sines"
    return Positions(
        cos=engine.upload(inputs.cos),
        sin=engine.upload(inputs.sin),
        style=shape.rotary,
        dims=shape.rotary_dims,
        tokens=inputs.cos.shape[1],
        per_row=inputs.cos.shape[0] > 1,
    )


def _turn(engine: Engine, heads: Heads, positions: Positions | None, q: Buffer, k: Buffer, *, back: bool) -> None:
    if positions is not None:
        n = heads.rows * heads.tokens
        engine.turn(q, positions, n, heads.heads, heads.head_dim, back=back)
        engine.turn(k, positions, n, heads.groups, heads.head_dim, back=back)


def _project(
    engine: Engine, shape: AttentionShape, weights: Mapping[str, Buffer], x: Buffer, inputs: AttentionInputs
) -> dict[str, Buffer]:
    n = inputs.x.shape[0] * inputs.x.shape[1]
    return {
        name: project(
            engine,
            (x, shape.hidden),
            (weights[f"w{name}"], width),
            n,
            bias=weights.get(f"b{name}"),
            added=inputs.added.get(name),
        )
        for name, width in _widths(shape).items()
    }


def forward_heads(
    engine: Engine, shape: AttentionShape, weights: Mapping[str, Buffer], inputs: AttentionInputs, *, inner: bool
) -> tuple[Outputs, SavedHeads]:
    """Compute the heads' part of the output."""
    rows, tokens, _ = inputs.x.shape
    width = shape.heads * shape.head_dim
    x = engine.upload(inputs.x)
    heads = Heads(
        **_project(engine, shape, weights, x, inputs),
        rows=rows,
        tokens=tokens,
        heads=shape.heads,
        groups=shape.groups,
        head_dim=shape.head_dim,
        scale=shape.scale,
        probabilities=engine.take(rows * shape.heads * tokens * tokens),
        keep=None if inputs.keep is None else engine.upload(inputs.keep),
        keep_scale=inputs.keep_scale,
    )
    saved = SavedHeads(
        x=x,
        heads=heads,
        inner=engine.take(rows * tokens * width),
        positions=_upload_positions(engine, shape, inputs),
        added=tuple(inputs.added),
    )
    _turn(engine, heads, saved.positions, heads.q, heads.k, back=False)
    mix_heads(engine, heads, inputs.bias, saved.inner)
    y = part_of_output(engine, (saved.inner, width), weights["wo"], (rows, tokens, shape.output))
    shown = engine.read(saved.inner, (rows, tokens, width)) if inner else None
    return Outputs(y=y, inner=shown), saved


def _inner_gradient(
    engine: Engine,
    shape: AttentionShape,
    weights: Mapping[str, Buffer],
    saved: SavedHeads,
    gradients: tuple[Buffer, Array | None],
) -> Buffer:
    """Gradient of what goes into the output projection."""
    n, width = saved.heads.rows * saved.heads.tokens, shape.heads * shape.head_dim
    result = engine.take(n * width)
    product_of_rows(engine, (gradients[0], shape.output), (weights["wo"], width), result, n)
    if gradients[1] is not None:
        add_array(engine, result, gradients[1])
    return result


def _projection_gradients(
    engine: Engine, shape: AttentionShape, saved: SavedHeads, d_inner: Buffer, need: Need
) -> dict[str, Buffer]:
    """Gradients of queries, keys and values as they left the projections."""
    n, widths = saved.heads.rows * saved.heads.tokens, _widths(shape)
    result = {
        name: engine.output((n, width)) if need.added and name in saved.added else engine.take(n * width)
        for name, width in widths.items()
    }
    mix_heads_gradient(engine, saved.heads, d_inner, result)
    _turn(engine, saved.heads, saved.positions, result["q"], result["k"], back=True)
    return result


def backward_heads(
    engine: Engine,
    shape: AttentionShape,
    weights: Mapping[str, Buffer],
    saved: SavedHeads,
    gradients: tuple[Array, Array | None],
    *,
    need: Need,
) -> Gradients:
    """Gradients from that of the output (and of `inner`, if any)."""
    rows, tokens = saved.heads.rows, saved.heads.tokens
    n, widths = rows * tokens, _widths(shape)
    d_y = engine.upload(gradients[0])
    d_inner = _inner_gradient(engine, shape, weights, saved, (d_y, gradients[1]))
    of_projections = _projection_gradients(engine, shape, saved, d_inner, need)
    engine.give(d_inner)
    results: dict[str, tuple[Buffer, tuple[int, ...]]] = {}
    if need.weights:
        results["wo"] = weight_gradient(engine, (d_y, shape.output), (saved.inner, widths["q"]), n)
        for name, width in widths.items():
            results[f"w{name}"] = weight_gradient(engine, (of_projections[name], width), (saved.x, shape.hidden), n)
            if shape.biased:
                results[f"b{name}"] = (engine.output((width,)), (width,))
                engine.column_sums(of_projections[name], results[f"b{name}"][0], n, width)
    engine.give(d_y)
    d_x = None
    if need.x:
        parts = [((of_projections[name], width), weights[f"w{name}"]) for name, width in widths.items()]
        d_x = input_gradient(engine, parts, shape.hidden, n)
    added: dict[str, Array] = {}
    for name, buffer in of_projections.items():
        if need.added and name in saved.added:
            added[name] = engine.download(buffer, (rows, tokens, widths[name]))
        else:
            engine.give(buffer)
    return Gradients(
        x=None if d_x is None else engine.download(d_x, (rows, tokens, shape.hidden)),
        weights={name: engine.download(buffer, sizes) for name, (buffer, sizes) in results.items()},
        added=added,
    )
