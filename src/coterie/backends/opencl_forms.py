"""Forms of the OpenCL product: which there are, and how a product is described to the kernels."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.backends.engine import Product, View

_WORDS = np.dtype(
    [(name, np.int32) for name in ["rows", "columns", "inner", "fold", "heads", "has_bias", "accumulate"]]
    + [("alpha", np.float32)]
    + [(f"a_{name}", np.int32) for name in ["row", "inner", "fold", "batch", "head", "shared"]]
    + [(f"b_{name}", np.int32) for name in ["inner", "column", "fold", "batch", "head", "shared"]]
    + [(name, np.int32) for name in ["c_row", "c_batch", "c_head", "unused"]]
)


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """How products are computed; the kernels' build options.

    Attributes:
        panels: Packed panels and a register tile (processors), or local-memory tiles (GPUs).
        rows: Rows of the register tile.
        columns: Columns of the register tile, a multiple of 8.
        depth: Steps of the summed index before the next panel.
        block_rows: Panels of rows a work-item does.
        block_columns: Panels of columns a work-item does.
        side: Work-items a side of a local tile.
        tile: Results a side of a work-item.
    """

    panels: bool
    rows: int = 6
    columns: int = 16
    depth: int = 256
    block_rows: int = 16
    block_columns: int = 32
    side: int = 16
    tile: int = 4

    @property
    def width(self) -> int:
        """Numbers at once in kernels that go over them one by one."""
        return 8 if self.panels else 1

    @property
    def numbers_at_once(self) -> int:
        """Numbers a work-item does in such kernels."""
        return 4096 if self.panels else 1

    @property
    def rows_at_once(self) -> int:
        """Rows of scores a work-item does."""
        return 16 if self.panels else 1

    @property
    def options(self) -> list[str]:
        """Definitions that the kernels are built with."""
        values = {
            "TILED": int(not self.panels),
            "RM": self.rows,
            "NV": self.columns // 8,
            "KC": self.depth,
            "MB": self.block_rows,
            "NB": self.block_columns,
            "LS": self.side,
            "RT": self.tile,
            "W": self.width,
            "PER": self.numbers_at_once,
            "ROWS": self.rows_at_once,
        }
        return [f"-D{name}={value}" for name, value in values.items()]


CANDIDATES_CPU = (
    Form(panels=True),
    Form(panels=True, rows=4, columns=16),  # fewer registers
    Form(panels=True, rows=12, columns=16),  # 32 vector registers
)
CANDIDATES_GPU = (Form(panels=False), Form(panels=False, side=8), Form(panels=False, side=8, tile=8))


def steps_up(a: int, b: int) -> int:
    """How many times b covers a."""
    return -(-a // b)


def product_words(product: Product) -> npt.NDArray[Any]:
    """Sizes and strides as the kernels read them."""
    a, b, c = product.a, product.b, product.c
    words = np.zeros(1, _WORDS)
    words[0] = (
        product.rows,
        product.columns,
        product.inner,
        product.fold or product.inner,
        product.heads,
        product.bias is not None,
        product.accumulate,
        product.alpha,
        *(a.row, a.column, a.fold, a.batch, a.head, a.shared),
        *(b.row, b.column, b.fold, b.batch, b.head, b.shared),
        *(c.row, c.batch, c.head, 0),
    )
    return words


def packing_key(product: Product, view: View) -> tuple[int, ...]:
    """What the packed form of the second operand depends on."""
    sizes = (product.columns, product.inner, product.fold, product.batch, product.heads)
    return (*sizes, view.row, view.column, view.fold, view.batch, view.head, view.shared)
