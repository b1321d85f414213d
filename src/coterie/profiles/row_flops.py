"""Operations of a model as a function of its rows' length: what a pass over any data costs, without running it."""

from collections.abc import Iterable

import msgspec


class RowFlops(msgspec.Struct, frozen=True, kw_only=True):
    """Multiply-adds x 2 of one row padded to T tokens: `constant + per_token * T + per_token_squared * T * T`.

    The square is attention's; the constant is of layers that see one position of a row only.
    """

    constant: float = 0.0
    per_token: float = 0.0
    per_token_squared: float = 0.0

    def of(self, tokens: int) -> float:
        """Operations of one row of `tokens` tokens, padding included."""
        return self.constant + (self.per_token + self.per_token_squared * tokens) * tokens

    def total(self, padded_lengths: Iterable[int]) -> float:
        """Operations of rows of these padded lengths."""
        return sum(self.of(tokens) for tokens in padded_lengths)


class UnitFlops(msgspec.Struct, frozen=True, kw_only=True):
    """One unit: its forward, and its backward given what is trained here and below."""

    forward: RowFlops
    backward: RowFlops


class ModelFlops(msgspec.Struct, frozen=True, kw_only=True):
    """A model's units in order. Of an optimizer's update, which is small beside them, nothing is counted."""

    units: tuple[UnitFlops, ...]

    def forward(self, padded_lengths: Iterable[int], *, with_output_layer: bool = True) -> float:
        """Operations of one forward pass over rows of these padded lengths.

        Args:
            padded_lengths: T of each row.
            with_output_layer: Off: the pass ends with the last block, as a device's does whose server holds that layer.
        """
        units = self.units if with_output_layer else self.units[:-1]
        return _sum_of([unit.forward for unit in units]).total(padded_lengths)

    def training(self, padded_lengths: Iterable[int]) -> float:
        """Operations of one forward and backward pass."""
        both = [unit.forward for unit in self.units] + [unit.backward for unit in self.units]
        return _sum_of(both).total(padded_lengths)


def through_three(lengths: tuple[int, int, int], counted: tuple[int, int, int]) -> RowFlops:
    """The parabola through counts at three equally spaced lengths; exact where a row's operations are one."""
    step = lengths[1] - lengths[0]
    assert step == lengths[2] - lengths[1] > 0, "equally spaced"
    squared = (counted[2] - 2 * counted[1] + counted[0]) / (2 * step * step)
    per_token = (counted[1] - counted[0]) / step - squared * (lengths[0] + lengths[1])
    constant = counted[0] - (per_token + squared * lengths[0]) * lengths[0]
    return RowFlops(constant=constant, per_token=per_token, per_token_squared=squared)


def _sum_of(parts: list[RowFlops]) -> RowFlops:
    return RowFlops(
        constant=sum(part.constant for part in parts),
        per_token=sum(part.per_token for part in parts),
        per_token_squared=sum(part.per_token_squared for part in parts),
    )
