"""Products over all rows of a micro-batch, as attention and feed-forward shares both need them."""

from coterie.backends.engine import Buffer, Engine, Product, View
from coterie.backends.shares import Array

Sized = tuple[Buffer, int]
"""A matrix over the rows, or a weight, with its width (of a weight: its rows)."""


def project(engine: Engine, x: Sized, weight: Sized, rows: int, *, bias: Buffer | None, added: Array | None) -> Buffer:
    """`x weight' + bias + added`, in memory of its own."""
    target = engine.take(rows * weight[1])
    engine.product(
        Product(
            a=View(buffer=x[0], row=x[1]),
            b=View(buffer=weight[0], row=x[1]).turned,
            c=View(buffer=target, row=weight[1]),
            rows=rows,
            columns=weight[1],
            inner=x[1],
            bias=bias,
        )
    )
    if added is not None:
        add_array(engine, target, added)
    return target


def add_array(engine: Engine, target: Buffer, array: Array) -> None:
    """Add an array of the processor's memory."""
    extra = engine.upload(array)
    engine.add(target, extra, array.size)
    engine.give(extra)


def product_of_rows(engine: Engine, a: Sized, b: Sized, target: Buffer, rows: int) -> None:
    """`target = a b` with b of [a's width, b's width]."""
    engine.product(
        Product(
            a=View(buffer=a[0], row=a[1]),
            b=View(buffer=b[0], row=b[1]),
            c=View(buffer=target, row=b[1]),
            rows=rows,
            columns=b[1],
            inner=a[1],
        )
    )


def part_of_output(engine: Engine, inner: Sized, weight: Buffer, sizes: tuple[int, int, int]) -> Array:
    """`inner weight'` [B,T,E]: what a share gives."""
    rows, tokens, width = sizes
    y = engine.output(sizes)
    engine.product(
        Product(
            a=View(buffer=inner[0], row=inner[1]),
            b=View(buffer=weight, row=inner[1]).turned,
            c=View(buffer=y, row=width),
            rows=rows * tokens,
            columns=width,
            inner=inner[1],
        )
    )
    return engine.download(y, sizes)


def weight_gradient(engine: Engine, outer: Sized, inner: Sized, rows: int) -> tuple[Buffer, tuple[int, ...]]:
    """`outer' inner` over the rows: the gradient of a weight of [outer, inner], and its shape."""
    (a, m), (b, n) = outer, inner
    target = engine.output((m, n))
    engine.product(
        Product(
            a=View(buffer=a, row=m).turned,
            b=View(buffer=b, row=n),
            c=View(buffer=target, row=n),
            rows=m,
            columns=n,
            inner=rows,
        )
    )
    return target, (m, n)


def input_gradient(engine: Engine, parts: list[tuple[Sized, Buffer]], hidden: int, rows: int) -> Buffer:
    """Sum of `gradient weight` over projections of the same input."""
    d_x = engine.output((rows, hidden))
    for index, ((gradient, width), weight) in enumerate(parts):
        engine.product(
            Product(
                a=View(buffer=gradient, row=width),
                b=View(buffer=weight, row=hidden),
                c=View(buffer=d_x, row=hidden),
                rows=rows,
                columns=hidden,
                inner=width,
                accumulate=index > 0,
            )
        )
    return d_x
