import math

import pytest
import torch

from coterie.pipeline.gradients import clip_in_place, squared_norm, sum_in_unit_order, unit_squared_norms


def test_the_squared_norm_of_a_large_tensor_is_exact_to_float64() -> None:
    tensor = torch.randn(300, 1001, generator=torch.Generator().manual_seed(1))
    assert squared_norm(tensor) == pytest.approx(tensor.double().square().sum().item(), rel=1e-12)


def test_a_transposed_and_an_empty_tensor_have_norms_too() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert squared_norm(tensor.t()) == 55
    assert squared_norm(torch.empty(0, 3)) == 0


def test_norms_are_added_up_per_unit_without_the_copy_that_another_stage_counts() -> None:
    units = {"a": 4, "b": 2, "c": 4, "tied": 5}
    gradients = {name: torch.full((2,), float(unit)) for name, unit in units.items()}
    sums = unit_squared_norms(gradients, units.__getitem__, counted_elsewhere="tied")
    assert sums == {4: 64.0, 2: 8.0}


def test_the_sum_over_units_does_not_depend_on_who_gave_them_first() -> None:
    values = {unit: 0.1 * 3**unit for unit in range(40)}
    assert sum_in_unit_order(values) == sum_in_unit_order(dict(reversed(values.items())))
    assert sum_in_unit_order({}) == 0


def test_clipping_scales_to_the_threshold_and_returns_the_norm_before() -> None:
    gradient = torch.tensor([3.0, 4.0])
    assert clip_in_place([gradient], 25.0, 1.0) == 5.0
    assert gradient.norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("max_norm", [0.0, 5.1])
def test_a_small_norm_or_a_threshold_of_zero_leaves_gradients_untouched(max_norm: float) -> None:
    gradient = torch.tensor([3.0, 4.0])
    clip_in_place([gradient], 25.0, max_norm)
    assert gradient.tolist() == [3.0, 4.0]


def test_a_nan_anywhere_makes_the_norm_nan() -> None:
    assert math.isnan(squared_norm(torch.tensor([1.0, float("nan"), 2.0])))
