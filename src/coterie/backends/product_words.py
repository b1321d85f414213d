"""How a product is described to kernels: sizes and strides in the order of their `Product` or `Words`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.backends.engine import Product
from coterie.errors import BackendError

WORDS = np.dtype(
    [(name, np.int32) for name in ["rows", "columns", "inner", "fold", "heads", "has_bias", "accumulate"]]
    + [("alpha", np.float32)]
    + [(f"a_{name}", np.int32) for name in ["row", "inner", "fold", "batch", "head", "shared"]]
    + [(f"b_{name}", np.int32) for name in ["inner", "column", "fold", "batch", "head", "shared"]]
    + [(name, np.int32) for name in ["c_row", "c_batch", "c_head", "z0"]]
)


def product_words(product: Product) -> npt.NDArray[Any]:
    """Sizes and strides as the kernels read them."""
    a, b, c = product.a, product.b, product.c
    words = np.zeros(1, WORDS)
    strides = (a.batch, b.batch, c.batch, a.row, b.row, c.row)
    if max(strides) > np.iinfo(np.int32).max:
        raise BackendError(
            f"a product of {product.rows} by {product.columns} for each of {product.heads} heads needs strides beyond "
            "those of 32 bits",
            hint="shorter rows need less",
        )
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
