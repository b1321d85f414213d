"""Attention heads as kernel launches on an engine: forward, and the backward written out.

Queries lie as [B,T,H,d], keys and values as [B,T,G,d], probabilities as [B,H,T,T]. The H / G heads of a group are
neighbours there, so a group's gradient of keys or values is one product whose summed index goes round H / G times.
"""

from collections.abc import Mapping

import msgspec

from coterie.backends.engine import Buffer, Engine, Positions, Product, View
from coterie.backends.launches_products import (
    add_array,
    input_gradient,
    part_of_output,
    product_of_rows,
    project,
    weight_gradient,
)
from coterie.backends.shares import Array, AttentionInputs, AttentionShape, Gradients, Need, Outputs

_PROJECTIONS = ("q", "k", "v")


class SavedHeads(msgspec.Struct, kw_only=True, eq=False):
    """What a forward keeps, on the device.

    Attributes:
        rows: B.
        tokens: T.
        x: [B,T,D].
        projected: `q`, `k`, `v`, turned.
        probabilities: [B,H,T,T] before dropout.
        inner: [B,T,H d].
        keep: Dropout's mask, if any.
        keep_scale: Its factor.
        positions: What queries and keys were turned by.
        added: Names of what was added to projections.
    """

    rows: int
    tokens: int
    x: Buffer
    projected: dict[str, Buffer]
    probabilities: Buffer
    inner: Buffer
    keep: Buffer | None
    keep_scale: float
    positions: Positions | None
    added: tuple[str, ...]

    def buffers(self) -> list[Buffer]:
        """All that is held."""
        held = [self.x, *self.projected.values(), self.probabilities, self.inner]
        if self.keep is not None:
            held.append(self.keep)
        if self.positions is not None:
            held += [self.positions.cos, self.positions.sin]
        return held


def _widths(shape: AttentionShape) -> dict[str, int]:
    grouped = shape.groups * shape.head_dim
    return {"q": shape.heads * shape.head_dim, "k": grouped, "v": grouped}


class _Views:
    """Where the batched matrices of B rows and H heads, or G groups, lie."""

    def __init__(self, shape: AttentionShape, tokens: int) -> None:
        self.shape = shape
        self.tokens = tokens
        self.per_group = shape.heads // shape.groups

    def heads(self, buffer: Buffer) -> View:
        """[T,d] of a query head."""
        d, width = self.shape.head_dim, self.shape.heads * self.shape.head_dim
        return View(buffer=buffer, row=width, batch=self.tokens * width, head=d)

    def groups(self, buffer: Buffer) -> View:
        """[T,d] of the group that a query head reads."""
        d, width = self.shape.head_dim, self.shape.groups * self.shape.head_dim
        return View(buffer=buffer, row=width, batch=self.tokens * width, head=d, shared=self.per_group)

    def own_groups(self, buffer: Buffer) -> View:
        """[T,d] of a group."""
        return msgspec.structs.replace(self.groups(buffer), shared=1)

    def scores(self, buffer: Buffer) -> View:
        """[T,T] of a query head."""
        t = self.tokens
        return View(buffer=buffer, row=t, batch=self.shape.heads * t * t, head=t * t)

    def group_scores(self, buffer: Buffer) -> View:
        """[T, (H/G) T], transposed: keys of a group by the queries of all its heads."""
        t = self.tokens
        return View(
            buffer=buffer,
            row=1,
            column=t,
            batch=self.shape.heads * t * t,
            head=self.per_group * t * t,
            fold=t * t,
        )

    def group_heads(self, buffer: Buffer) -> View:
        """[(H/G) T, d]: the query heads of a group below each other."""
        d, width = self.shape.head_dim, self.shape.heads * self.shape.head_dim
        return View(buffer=buffer, row=width, batch=self.tokens * width, head=self.per_group * d, fold=d)


def _batched(  # noqa: PLR0913 - three matrices and their sizes
    views: _Views, rows: int, *, a: View, b: View, c: View, sizes: tuple[int, int, int], alpha: float = 1.0
) -> Product:
    return Product(
        a=a, b=b, c=c, rows=sizes[0], columns=sizes[1], inner=sizes[2], batch=rows, heads=views.shape.heads, alpha=alpha
    )


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


def _turn(
    engine: Engine, shape: AttentionShape, saved: SavedHeads, projected: Mapping[str, Buffer], *, back: bool
) -> None:
    if saved.positions is not None:
        n = saved.rows * saved.tokens
        engine.turn(projected["q"], saved.positions, n, shape.heads, shape.head_dim, back=back)
        engine.turn(projected["k"], saved.positions, n, shape.groups, shape.head_dim, back=back)


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


def _bias_strides(bias: Array) -> tuple[int, int, int]:
    """Of row, head and query; 0 where all share one."""
    strides = []
    step = bias.shape[3]
    for axis in (2, 1, 0):
        strides.append(step if bias.shape[axis] > 1 else 0)
        step *= bias.shape[axis]
    return strides[2], strides[1], strides[0]


def forward_heads(
    engine: Engine, shape: AttentionShape, weights: Mapping[str, Buffer], inputs: AttentionInputs, *, inner: bool
) -> tuple[Outputs, SavedHeads]:
    """Compute the heads' part of the output."""
    rows, tokens, _ = inputs.x.shape
    width, views = shape.heads * shape.head_dim, _Views(shape, tokens)
    x = engine.upload(inputs.x)
    saved = SavedHeads(
        rows=rows,
        tokens=tokens,
        x=x,
        projected=_project(engine, shape, weights, x, inputs),
        probabilities=engine.take(rows * shape.heads * tokens * tokens),
        inner=engine.take(rows * tokens * width),
        keep=None if inputs.keep is None else engine.upload(inputs.keep),
        keep_scale=inputs.keep_scale,
        positions=_upload_positions(engine, shape, inputs),
        added=tuple(inputs.added),
    )
    _turn(engine, shape, saved, saved.projected, back=False)
    q, k, v = (saved.projected[name] for name in _PROJECTIONS)
    sizes = (tokens, tokens, shape.head_dim)
    scores = views.scores(saved.probabilities)
    engine.product(
        _batched(views, rows, a=views.heads(q), b=views.groups(k).turned, c=scores, sizes=sizes, alpha=shape.scale)
    )
    bias = None if inputs.bias is None else engine.upload(inputs.bias)
    strides = (0, 0, 0) if inputs.bias is None else _bias_strides(inputs.bias)
    engine.softmax(saved.probabilities, bias, strides, (rows, shape.heads, tokens))
    if bias is not None:
        engine.give(bias)
    kept = _kept(engine, shape, saved)
    sizes = (tokens, shape.head_dim, tokens)
    engine.product(
        _batched(views, rows, a=views.scores(kept), b=views.groups(v), c=views.heads(saved.inner), sizes=sizes)
    )
    if kept is not saved.probabilities:
        engine.give(kept)
    y = part_of_output(engine, (saved.inner, width), weights["wo"], (rows, tokens, shape.output))
    shown = engine.read(saved.inner, (rows, tokens, width)) if inner else None
    return Outputs(y=y, inner=shown), saved


def _kept(engine: Engine, shape: AttentionShape, saved: SavedHeads) -> Buffer:
    """Probabilities after dropout; the saved ones themselves if there is none."""
    if saved.keep is None:
        return saved.probabilities
    n = saved.rows * shape.heads * saved.tokens**2
    kept = engine.take(n)
    engine.drop(saved.probabilities, saved.keep, kept, n, saved.keep_scale)
    return kept


def _inner_gradient(
    engine: Engine,
    shape: AttentionShape,
    weights: Mapping[str, Buffer],
    saved: SavedHeads,
    gradients: tuple[Buffer, Array | None],
) -> Buffer:
    """Gradient of what goes into the output projection."""
    n, width = saved.rows * saved.tokens, shape.heads * shape.head_dim
    result = engine.take(n * width)
    product_of_rows(engine, (gradients[0], shape.output), (weights["wo"], width), result, n)
    if gradients[1] is not None:
        add_array(engine, result, gradients[1])
    return result


def _score_gradient(engine: Engine, shape: AttentionShape, saved: SavedHeads, d_inner: Buffer) -> Buffer:
    """Gradient of the scores, before they were scaled."""
    views, n = _Views(shape, saved.tokens), saved.rows * shape.heads * saved.tokens**2
    result = engine.take(n)
    engine.product(
        _batched(
            views,
            saved.rows,
            a=views.heads(d_inner),
            b=views.groups(saved.projected["v"]).turned,
            c=views.scores(result),
            sizes=(saved.tokens, saved.tokens, shape.head_dim),
        )
    )
    if saved.keep is not None:
        engine.drop(result, saved.keep, result, n, saved.keep_scale)
    engine.softmax_gradient(
        saved.probabilities, result, saved.tokens, saved.rows * shape.heads * saved.tokens, shape.scale
    )
    return result


def _projection_gradients(
    engine: Engine, shape: AttentionShape, saved: SavedHeads, d_inner: Buffer, need: Need
) -> dict[str, Buffer]:
    """Gradients of queries, keys and values as they left the projections."""
    views, n = _Views(shape, saved.tokens), saved.rows * saved.tokens
    widths = _widths(shape)
    result = {
        name: engine.output((n, widths[name])) if need.added and name in saved.added else engine.take(n * widths[name])
        for name in _PROJECTIONS
    }

    def of_groups(scores: Buffer, heads: Buffer, target: Buffer) -> None:
        engine.product(
            Product(
                a=views.group_scores(scores),
                b=views.group_heads(heads),
                c=views.own_groups(target),
                rows=saved.tokens,
                columns=shape.head_dim,
                inner=views.per_group * saved.tokens,
                fold=saved.tokens,
                batch=saved.rows,
                heads=shape.groups,
            )
        )

    kept = _kept(engine, shape, saved)
    of_groups(kept, d_inner, result["v"])
    if kept is not saved.probabilities:
        engine.give(kept)
    d_scores = _score_gradient(engine, shape, saved, d_inner)
    engine.product(
        _batched(
            views,
            saved.rows,
            a=views.scores(d_scores),
            b=views.groups(saved.projected["k"]),
            c=views.heads(result["q"]),
            sizes=(saved.tokens, shape.head_dim, saved.tokens),
        )
    )
    of_groups(d_scores, saved.projected["q"], result["k"])
    engine.give(d_scores)
    _turn(engine, shape, saved, result, back=True)
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
    rows, tokens = saved.rows, saved.tokens
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
