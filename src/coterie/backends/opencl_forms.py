"""Forms of the OpenCL product: which there are."""

import msgspec

from coterie.backends.engine import Product, View


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """How products are computed; the kernels' build options.

    Attributes:
        panels: Packed panels and a register tile (processors), or local-memory tiles (GPUs).
        rows: Rows of the register tile.
        columns: Columns of the register tile, a multiple of `width`.
        width: Numbers at once: 8, or 16 on processors with registers for them; 1 on GPUs.
        depth: Steps of the summed index before the next panel.
        block_rows: Panels of rows a work-item does.
        block_columns: Panels of columns a work-item does.
        side: Work-items a side of a local tile.
        tile: Results a side of a work-item.
    """

    panels: bool
    rows: int = 6
    columns: int = 16
    width: int = 8
    depth: int = 256
    block_rows: int = 16
    block_columns: int = 32
    side: int = 16
    tile: int = 4

    @property
    def numbers_at_once(self) -> int:
        """Numbers a work-item does in kernels that go over them one by one."""
        return 4096 if self.panels else 1

    @property
    def rows_at_once(self) -> int:
        """Rows of scores a work-item does."""
        return 16 if self.panels else 1

    @property
    def score_rows(self) -> int:
        """Rows of scores that the backward of attention has at a time, a multiple of the register tile's."""
        return 8 * self.rows

    @property
    def sums_at_once(self) -> int:
        """Columns that a work-item sums: several lines of a processor's cache."""
        return 8 * self.width if self.panels else 1

    @property
    def options(self) -> list[str]:
        """Definitions that the kernels are built with."""
        values = {
            "TILED": int(not self.panels),
            "RM": self.rows,
            "NV": self.columns // self.width,
            "KC": self.depth,
            "MB": self.block_rows,
            "NB": self.block_columns,
            "LS": self.side,
            "RT": self.tile,
            "W": self.width,
            "PER": self.numbers_at_once,
            "ROWS": self.rows_at_once,
            "BLOCK": self.score_rows,
            "SUMS": self.sums_at_once // self.width,
        }
        return [f"-D{name}={value}" for name, value in values.items()]


_WIDE = Form(panels=True, rows=8, columns=32, width=16, block_rows=8)
_CPU = (Form(panels=True), Form(panels=True, rows=4, columns=16))  # the second takes fewer registers
_GPU = (
    Form(panels=False, width=1),
    Form(panels=False, width=1, side=8),
    Form(panels=False, width=1, side=8, tile=8),
)


def candidates(*, is_cpu: bool, native_width: int) -> tuple[Form, ...]:
    """What is tried on a device, the usual first; `native_width`: the numbers that it computes with at once."""
    if not is_cpu:
        return _GPU
    return (_WIDE, *_CPU) if native_width >= _WIDE.width else _CPU


def steps_up(a: int, b: int) -> int:
    """How many times b covers a."""
    return -(-a // b)


def packing_key(product: Product, view: View) -> tuple[int, ...]:
    """What the packed form of the second operand depends on."""
    sizes = (product.columns, product.inner, product.fold, product.batch, product.heads)
    return (*sizes, view.row, view.column, view.fold, view.batch, view.head, view.shared)
