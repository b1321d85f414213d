"""Weight versions of one stage's trainable parameters, kept only while a micro-batch still needs them.

A version is a set of `Parameter` objects. Autograd keeps the *object* of a leaf, not its storage, so a version that a
micro-batch in flight has used is never written to: where an update finds such users, the optimizer moves on to fresh
copies and the old objects stay as they are. Where there are none (`flush` and `gpipe` always, a last stage of `stash`)
the update is in place, and nothing is copied.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from coterie.models import StageModule
from coterie.schedules.actions import Action


class _Weights:
    """One set of parameters. Several version numbers share it where an update was skipped."""

    __slots__ = ("last_use", "parameters")

    def __init__(self, parameters: dict[str, Parameter], last_use: int) -> None:
        self.parameters = parameters
        self.last_use = last_use


class WeightStash:
    """Which weights a forward or backward runs with, and on which weights the gradients of a step lie."""

    def __init__(self, stage: StageModule) -> None:
        self._stage = stage
        self._current = _Weights(stage.trainable(), -1)
        self._installed = self._current
        self._holder = self._current
        self._versions: dict[int, _Weights] = {0: self._current}
        self._last_uses: dict[int, int] = {}
        self._bytes = sum(parameter.nbytes for parameter in self._current.parameters.values())

    def open_segment(self, actions: Sequence[Action]) -> None:
        """Number the current weights 0 and learn from the actions how long each version will be needed."""
        self._last_uses = {a.weight_version: index for index, a in enumerate(actions) if a.kind in {"F", "B"}}
        self._current.last_use = self._last_uses.get(0, -1)
        self._versions = {0: self._current}

    def install(self, version: int) -> None:
        """Put the parameters of `version` into the module; before a backward too, since recomputation reads them."""
        weights = self._versions[version]
        if weights is not self._installed:
            self._stage.swap_parameters(weights.parameters)
            self._installed = weights

    def collect_on(self, version: int) -> None:
        """Make the gradients collected so far lie where a backward through `version` will add its own."""
        self._move_gradients(self._versions[version])

    def gradients(self) -> dict[str, Tensor]:
        """The gradients collected since the last update, by parameter name in unit order; only those that exist."""
        return {name: p.grad for name, p in self._holder.parameters.items() if p.grad is not None}

    def set_gradient(self, name: str, gradient: Tensor) -> None:
        """Replace the collected gradient of one parameter."""
        self._holder.parameters[name].grad = gradient

    def drop_gradients(self) -> None:
        """Give the memory of all collected gradients back."""
        for parameter in self._holder.parameters.values():
            parameter.grad = None

    def next_version(self, version: int, index: int) -> dict[str, Parameter]:
        """The parameters that the update at action `index` writes to, from then on `version`."""
        if self._current.parameters and self._current.last_use > index:
            copies = {name: Parameter(p.detach().clone()) for name, p in self._current.parameters.items()}
            self._current = _Weights(copies, -1)
        self._number_current(version)
        return self._current.parameters

    def repeat_version(self, version: int) -> None:
        """Number the current weights `version` too: an update that was skipped."""
        self._number_current(version)

    def release(self, index: int) -> None:
        """Forget the versions that no action after `index` needs."""
        if len(self._versions) > 1:
            kept = {n: w for n, w in self._versions.items() if w is self._current or w.last_use > index}
            self._versions = kept
            if self._installed not in kept.values():
                self.install_current()
            if self._holder not in kept.values():
                self._move_gradients(self._current)

    def install_current(self) -> None:
        """Put the newest parameters into the module, for whoever reads them between segments."""
        if self._installed is not self._current:
            self._stage.swap_parameters(self._current.parameters)
            self._installed = self._current

    def abandon(self) -> None:
        """After a failure in mid-segment: drop gradients and older versions, keep the newest weights."""
        self.drop_gradients()
        self._holder = self._current
        self._versions = {0: self._current}
        self.install_current()

    @property
    def newest(self) -> dict[str, Parameter]:
        """The newest parameters, whichever are in the module now."""
        return self._current.parameters

    @property
    def live_versions(self) -> int:
        """Distinct sets of parameters in memory, the newest included."""
        return len({id(weights) for weights in self._versions.values()})

    @property
    def stashed_bytes(self) -> int:
        """Bytes of all sets beside the newest."""
        return (self.live_versions - 1) * self._bytes

    def _move_gradients(self, weights: _Weights) -> None:
        if weights is self._holder:
            return
        for name, parameter in self._holder.parameters.items():
            weights.parameters[name].grad, parameter.grad = parameter.grad, None
        self._holder = weights

    def _number_current(self, version: int) -> None:
        self._versions[version] = self._current
        self._current.last_use = max(self._current.last_use, self._last_uses.get(version, -1))
