import pytest

from coterie.pipeline.executor_settings import trains_below


@pytest.mark.parametrize(
    ("trainable", "first_unit", "expected"),
    [
        ((("e",), (), ("b",)), 0, False),
        ((("e",), (), ("b",)), 1, True),
        (((), (), ("b",)), 2, False),
        (((), (), ("b",)), 1, False),
        (((), ("a",), ()), 2, True),
    ],
)
def test_gradients_are_sent_down_only_if_a_unit_below_is_trained(
    trainable: tuple[tuple[str, ...], ...], first_unit: int, expected: bool
) -> None:
    assert trains_below(trainable, first_unit) is expected
