"""The trainable network beside the backbone: a ladder of narrow layers, one token at a time (METHODS.md 2.4).

With h_l the output of block l - 1 at a token, k the first layer tapped, T the temperature:

    z_k = h_k                                    z_l = g_l s_(l-1) + (1 - g_l) h_l,   g_l = sigmoid(a_l / T)
    s_l = z_l + U_l gelu(V_l norm_l(z_l))        result = (a / T) s_L

U and all a start at zero: at first the result is zero, and the backbone with it computes what it does alone. Open in
the papers and chosen here: below the first tap there is no state, so that it has no gate; norm is a layer norm with
weight and bias; V and U have no biases; the last gate is linear, so that it may have either sign, and divided by T like
the others, so that an optimizer whose steps do not depend on the gradient's size (AdamW) opens it in a few steps.

What U gives is added to states as large as the backbone's own, so the learning rate follows their size, and is far
above what weights of the model itself are tuned with: for encoders of the BERT kind about 1e-3 to 3e-3; for
decoders, whose states grow from layer to layer (norm 800 in SmolLM2-135M's last, 7 in MiniLM's), about 3e-3 to 1e-2.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.jobs.side_spec import SideSpec
from coterie.models.keys import seed_for_name

PREFIX = "side_network."
"""Before a parameter's name where it stands beside the backbone's; part of what its starting value depends on."""


class SideNetwork(nn.Module):
    """Takes the layers of some tokens and gives what is added to the backbone's last layer.

    Its parameters are `norms.{l}.weight`, `norms.{l}.bias` (D,), `down.{l}.weight` (R, D), `up.{l}.weight` (D, R) for
    every tapped layer l, `gates.{l}` () for all of them but the lowest, and `output_gate` (). Starting values depend on
    seed and name alone.

    Attributes:
        layers: The layers that it takes, ascending.
        width: Width D of the backbone's hidden states.
    """

    def __init__(self, layers: int, width: int, spec: SideSpec, seed: int) -> None:
        """Make a network for a backbone of `layers` blocks and hidden states of `width` D."""
        super().__init__()
        assert 1 <= spec.first_layer <= layers, f"there is no layer {spec.first_layer} of {layers}"
        self.width = width
        self.layers = tuple(range(spec.first_layer, layers + 1))
        self._temperature = spec.temperature
        names = [str(layer) for layer in self.layers]
        self.norms = nn.ModuleDict({name: nn.LayerNorm(width) for name in names})
        self.down = nn.ModuleDict({name: _down(name, width, spec.rank, seed) for name in names})
        self.up = nn.ModuleDict({name: _up(spec.rank, width) for name in names})
        self.gates = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in names[1:]})
        self.output_gate = nn.Parameter(torch.zeros(()))

    def forward(self, taps: Tensor) -> Tensor:
        """What is added to the last layer's hidden states.

        Args:
            taps: Activations of N tokens, (N, L', D), the layers ascending.

        Returns:
            (N, D).
        """
        assert taps.shape[1] == len(self.layers), f"{taps.shape[1]} layers where {len(self.layers)} are tapped"
        state = None
        for index, layer in enumerate(self.layers):
            state = self.climb(layer, state, taps[:, index])
        assert state is not None
        return self.result(state)

    def climb(self, layer: int, state: Tensor | None, hidden: Tensor) -> Tensor:
        """One rung: the state after a layer.

        Args:
            layer: The layer.
            state: After the layer below, of the shape of `hidden`; None for the lowest.
            hidden: The layer's activations, (..., D).
        """
        name = str(layer)
        if state is not None:
            gate = torch.sigmoid(self.gates[name] / self._temperature)
            hidden = torch.lerp(hidden, state, gate)
        narrow = self.down[name](self.norms[name](hidden))
        risen: Tensor = hidden + self.up[name](functional.gelu(narrow))
        return risen

    def result(self, state: Tensor) -> Tensor:
        """What is added to the last layer's hidden states: the state after it, (..., D), through the last gate."""
        return state * (self.output_gate / self._temperature)


def _down(layer: str, width: int, rank: int, seed: int) -> nn.Linear:
    draw = torch.Generator().manual_seed(seed_for_name(seed, f"{PREFIX}down.{layer}.weight"))
    return _linear(torch.empty(rank, width).normal_(std=1 / math.sqrt(width), generator=draw))


def _up(rank: int, width: int) -> nn.Linear:
    return _linear(torch.zeros(width, rank))


def _linear(weight: Tensor) -> nn.Linear:
    """Made on no device first, since starting values of torch's own would be drawn from the global generator."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    return linear
