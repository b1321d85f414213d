import pytest
import torch

from coterie.errors import OutOfMemoryError
from coterie.pipeline.compute import computing


def test_a_real_failed_allocation_becomes_an_error_that_names_the_stage() -> None:
    with (
        pytest.raises(OutOfMemoryError, match="stage 1 on attic laptop ran out of memory"),
        computing("stage 1 on attic laptop"),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_a_memory_error_of_python_is_named_too() -> None:
    with pytest.raises(OutOfMemoryError, match="phone ran out of memory: allocation failed"), computing("phone"):
        raise MemoryError


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught, computing("phone"):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not isinstance(caught.value, OutOfMemoryError)
