"""Attention between the projections: by a kernel that does all of it, or by products over whole score matrices.

Queries lie as [B,T,H,d], keys and values as [B,T,G,d], probabilities as [B,H,T,T]. The H / G heads of a group are
neighbours there, so a group's gradient of keys or values is one product whose summed index goes round H / G times.
"""

from collections.abc import Mapping

import msgspec

from coterie.backends.engine import Buffer, Engine, Heads, Product, View
from coterie.backends.shares import Array


def mix_heads(engine: Engine, heads: Heads, bias: Array | None, inner: Buffer) -> None:
    """Scores, probabilities, and the values that they mix, into `inner` [B,T,H,d].

    Args:
        engine: Where.
        heads: Their probabilities are filled in.
        bias: What is added to the scores [B or 1, H or 1, T or 1, T].
        inner: The result.
    """
    uploaded = None if bias is None else engine.upload(bias)
    strides = (0, 0, 0) if bias is None else _bias_strides(bias)
    if engine.mixer is not None and engine.mixer.takes(heads):
        engine.mixer.forward(heads, uploaded, strides, inner)
    else:
        _mix_by_products(engine, heads, uploaded, strides, inner)
    if uploaded is not None:
        engine.give(uploaded)


def mix_heads_gradient(engine: Engine, heads: Heads, d_inner: Buffer, gradients: Mapping[str, Buffer]) -> None:
    """Gradients of queries, keys and values into those of `q`, `k` and `v`, from that of `inner`."""
    if engine.mixer is not None and engine.mixer.takes(heads):
        engine.mixer.backward(heads, d_inner, gradients)
    else:
        _gradient_by_products(engine, heads, d_inner, gradients)


def _bias_strides(bias: Array) -> tuple[int, int, int]:
    """Of row, head and query; 0 where all share one."""
    strides = []
    step = bias.shape[3]
    for axis in (2, 1, 0):
        strides.append(step if bias.shape[axis] > 1 else 0)
        step *= bias.shape[axis]
    return strides[2], strides[1], strides[0]


class _Views:
    """Where the batched matrices of B rows and H heads, or G groups, lie."""

    def __init__(self, heads: Heads) -> None:
        self._d = heads.head_dim
        self._tokens = heads.tokens
        self._heads = heads.heads
        self._groups = heads.groups
        self.per_group = heads.heads // heads.groups

    def heads(self, buffer: Buffer) -> View:
        """[T,d] of a query head."""
        width = self._heads * self._d
        return View(buffer=buffer, row=width, batch=self._tokens * width, head=self._d)

    def groups(self, buffer: Buffer) -> View:
        """[T,d] of the group that a query head reads."""
        width = self._groups * self._d
        return View(buffer=buffer, row=width, batch=self._tokens * width, head=self._d, shared=self.per_group)

    def own_groups(self, buffer: Buffer) -> View:
        """[T,d] of a group."""
        return msgspec.structs.replace(self.groups(buffer), shared=1)

    def scores(self, buffer: Buffer) -> View:
        """[T,T] of a query head."""
        t = self._tokens
        return View(buffer=buffer, row=t, batch=self._heads * t * t, head=t * t)

    def group_scores(self, buffer: Buffer) -> View:
        """[T, (H/G) T], transposed: keys of a group by the queries of all its heads."""
        t = self._tokens
        return View(buffer=buffer, row=1, column=t, batch=self._heads * t * t, head=self.per_group * t * t, fold=t * t)

    def group_heads(self, buffer: Buffer) -> View:
        """[(H/G) T, d]: the query heads of a group below each other."""
        width = self._heads * self._d
        return View(buffer=buffer, row=width, batch=self._tokens * width, head=self.per_group * self._d, fold=self._d)


def _of_heads(heads: Heads, a: View, b: View, c: View, *, mixes: bool, alpha: float = 1.0) -> Product:
    """A product of each head: [T,T] by [T,d] if it mixes, or [T,d] by [d,T]."""
    t, d = heads.tokens, heads.head_dim
    return Product(
        a=a,
        b=b,
        c=c,
        rows=t,
        columns=d if mixes else t,
        inner=t if mixes else d,
        batch=heads.rows,
        heads=heads.heads,
        alpha=alpha,
    )


def _mix_by_products(
    engine: Engine, heads: Heads, bias: Buffer | None, strides: tuple[int, int, int], inner: Buffer
) -> None:
    views = _Views(heads)
    scores, keys = views.scores(heads.probabilities), views.groups(heads.k).turned
    engine.product(_of_heads(heads, views.heads(heads.q), keys, scores, mixes=False, alpha=heads.scale))
    engine.softmax(heads.probabilities, bias, strides, (heads.rows, heads.heads, heads.tokens))
    kept = _kept(engine, heads)
    engine.product(_of_heads(heads, views.scores(kept), views.groups(heads.v), views.heads(inner), mixes=True))
    if kept is not heads.probabilities:
        engine.give(kept)


def _kept(engine: Engine, heads: Heads) -> Buffer:
    """Probabilities after dropout; the saved ones themselves if there is none."""
    if heads.keep is None:
        return heads.probabilities
    n = heads.scores
    kept = engine.take(n)
    engine.drop(heads.probabilities, heads.keep, kept, n, heads.keep_scale)
    return kept


def _score_gradient(engine: Engine, heads: Heads, d_inner: Buffer) -> Buffer:
    """Gradient of the scores, before they were scaled."""
    views, n = _Views(heads), heads.scores
    result = engine.take(n)
    values = views.groups(heads.v).turned
    engine.product(_of_heads(heads, views.heads(d_inner), values, views.scores(result), mixes=False))
    if heads.keep is not None:
        engine.drop(result, heads.keep, result, n, heads.keep_scale)
    engine.softmax_gradient(heads.probabilities, result, heads.tokens, n // heads.tokens, heads.scale)
    return result


def _gradient_by_products(engine: Engine, heads: Heads, d_inner: Buffer, gradients: Mapping[str, Buffer]) -> None:
    views = _Views(heads)

    def of_groups(scores: Buffer, of_heads: Buffer, target: Buffer) -> None:
        engine.product(
            Product(
                a=views.group_scores(scores),
                b=views.group_heads(of_heads),
                c=views.own_groups(target),
                rows=heads.tokens,
                columns=heads.head_dim,
                inner=views.per_group * heads.tokens,
                fold=heads.tokens,
                batch=heads.rows,
                heads=heads.groups,
            )
        )

    kept = _kept(engine, heads)
    of_groups(kept, d_inner, gradients["v"])
    if kept is not heads.probabilities:
        engine.give(kept)
    d_scores = _score_gradient(engine, heads, d_inner)
    queries = views.heads(gradients["q"])
    engine.product(_of_heads(heads, views.scores(d_scores), views.groups(heads.k), queries, mixes=True))
    of_groups(d_scores, heads.q, gradients["k"])
    engine.give(d_scores)
