"""AdamW and SGD over named parameters, with a state that moves between stages by parameter name."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from coterie.errors import CheckpointError
from coterie.jobs.optimizer_spec import OptimizerSpec

ParameterState = dict[str, Tensor]
"""Of one parameter: `exp_avg`, `exp_avg_sq`, `step` (AdamW) or `momentum_buffer` (SGD with momentum)."""


class StageOptimizer:
    """Applies updates to one stage's trainable parameters.

    It calls the same kernels as `torch.optim.AdamW` and `torch.optim.SGD`, and equals them bit for bit, but keeps its
    state by name: the parameter objects change with every weight version, and a checkpoint by layer is read by another
    cut. AdamW uses the fused kernel: the default loop needs transients of the largest tensor's size, also on a CPU.
    Norms and biases (tensors with at most one dimension) do not decay, as in the single-device trainer.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self._state: dict[str, ParameterState] = {}

    def apply(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """Update in place every parameter that has a gradient."""
        decayed = [name for name in gradients if parameters[name].ndim > 1]
        plain = [name for name in gradients if parameters[name].ndim <= 1]
        step = self._adamw if self.spec.name == "adamw" else self._sgd
        with torch.no_grad():
            for names, weight_decay in ((decayed, self.spec.weight_decay), (plain, 0.0)):
                if names:
                    step(
                        [parameters[name] for name in names],
                        [gradients[name] for name in names],
                        names,
                        learning_rate,
                        weight_decay,
                    )

    def state(self) -> dict[str, ParameterState]:
        """Per parameter name, its tensors; they are the live ones, to be written or copied before the next update."""
        return {name: dict(tensors) for name, tensors in self._state.items()}

    def load_state(
        self, state: Mapping[str, ParameterState], parameters: Mapping[str, Tensor], *, hand_over: bool = False
    ) -> None:
        """Replace the state by copies of `state`; parameters without an entry start afresh.

        With `hand_over` its tensors themselves are used and changed, as far as they lie on the right device: a stage
        that is built from a replica has no room for moments twice.

        Raises:
            CheckpointError: An entry belongs to no parameter of this stage, or has another shape or other tensors.
        """
        loaded: dict[str, ParameterState] = {}
        for name, tensors in state.items():
            if name not in parameters:
                raise CheckpointError(
                    f"optimizer state for {name}, which this stage does not train",
                    hint="resume with the method and the frozen parameters that the checkpoint was made with",
                )
            parameter = parameters[name]
            wanted = self._state_shapes(parameter)
            got = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
            if got != wanted:
                raise CheckpointError(
                    f"optimizer state of {name} has {got}, {self.spec.name} needs {wanted}",
                    hint="resume with the optimizer that the checkpoint was made with",
                )
            loaded[name] = {
                key: tensor.detach().to(device=parameter.device, dtype=torch.float32, copy=not hand_over)
                for key, tensor in tensors.items()
            }
        self._state = loaded

    def _state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        shape = tuple(parameter.shape)
        if self.spec.name == "adamw":
            return {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}
        return {"momentum_buffer": shape} if self.spec.momentum else {}

    def _adamw(
        self, parameters: list[Tensor], gradients: list[Tensor], names: list[str], rate: float, weight_decay: float
    ) -> None:
        for name, parameter in zip(names, parameters, strict=True):
            if name not in self._state:
                self._state[name] = {
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                }
        states = [self._state[name] for name in names]
        adamw(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self.spec.betas[0],
            beta2=self.spec.betas[1],
            lr=rate,
            weight_decay=weight_decay,
            eps=self.spec.epsilon,
            maximize=False,
        )
        # The fused kernel forgets to say that it has written; backends that hold copies of weights go by that.
        increment_version(parameters)

    def _sgd(
        self, parameters: list[Tensor], gradients: list[Tensor], names: list[str], rate: float, weight_decay: float
    ) -> None:
        buffers = [self._state.get(name, {}).get("momentum_buffer") for name in names]
        sgd(
            parameters,
            gradients,
            buffers,
            foreach=False,
            weight_decay=weight_decay,
            momentum=self.spec.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for name, buffer in zip(names, buffers, strict=True):
            if buffer is not None:
                self._state[name] = {"momentum_buffer": buffer}
