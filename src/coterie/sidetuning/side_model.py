"""What the server trains: the side network, and the backbone's output layer over both, one token at a time."""

import msgspec
import torch
from torch import Tensor, nn

from coterie.errors import RecipeError
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.side_spec import SideSpec
from coterie.models import RandomKey, StageModule, WeightStore, build_stage, config_of, describe
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.side_network import PREFIX, SideNetwork

_NO_DROPOUT = RandomKey(seed=0, step=0, micro_batch=0)


class SideModel:
    """Side network and output layer.

    The output layer is the model's own unit, run on rows of one token each: it reads a row's first token, its last, or
    every one, and each of them is that token. Dropout stays off, so that live training and replay are one arithmetic.

    Attributes:
        side: The settings.
        network: The side network.
        output: The output layer's stage. Its task layers are trained if the spec trains them (`head`); a language
            model's output matrix is frozen.
        output_width: Logits of a token, C.
    """

    def __init__(self, side: SideSpec, output: StageModule, network: SideNetwork) -> None:
        """Take a stage that holds the output unit alone."""
        assert output.first_unit == output.unit_count - 1, "the stage is more than the output layer"
        output.eval()
        self.side = side
        self.network = network
        self.output = output
        self._first_output = {name: nn.Parameter(p.detach().clone()) for name, p in output.trainable().items()}
        with torch.no_grad():
            self.output_width = self.read(torch.zeros(1, network.width, device=output.device)).shape[-1]

    def parameters(self) -> dict[str, nn.Parameter]:
        """All that is trained: the network's under `side_network.…`, task layers under the names they have."""
        own = {PREFIX + name: parameter for name, parameter in self.network.named_parameters()}
        return own | self.output.trainable()

    @property
    def held_bytes(self) -> int:
        """Of all parameters, frozen and trained."""
        parts = (*self.network.parameters(), *self.output.parameters().values(), *self._first_output.values())
        return sum(parameter.nbytes for parameter in parts)

    def hidden(self, taps: Tensor) -> Tensor:
        """The last layer with what the side network adds, (N, D), of activations (N, L', D)."""
        added: Tensor = self.network(taps)
        return taps[:, -1] + added

    def read(self, hidden: Tensor) -> Tensor:
        """Logits (M, C) of the last layer's hidden states (M, D)."""
        rows = len(hidden)
        ids = torch.zeros(rows, 1, dtype=torch.long, device=hidden.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        logits = self.output.forward(inputs, hidden.unsqueeze(1), _NO_DROPOUT)
        return logits.reshape(rows, logits.shape[-1])

    def logits(self, batch: ActivationBatch) -> Tensor:
        """Logits (M, C) of backbone and side network together, of the tokens that enter the loss."""
        hidden = self.hidden(batch.taps.to(self.output.device))
        return self.read(hidden if batch.loss_index is None else hidden[batch.loss_index.to(hidden.device)])

    def additions(self, batch: ActivationBatch) -> Tensor:
        """What the side network changes of the backbone's logits, (M, C); zero before the first step.

        This is the server's output in additive mode: the device adds it to its own. The backbone's logits are those of
        the output layer as it started, which is the one that the device has.
        """
        return self.logits(batch) - self.backbone_logits(batch)

    def backbone_logits(self, batch: ActivationBatch) -> Tensor:
        """Logits (M, C) of the backbone alone, by the output layer as it started."""
        trained = self.output.trainable()
        self.output.swap_parameters(self._first_output)
        try:
            with torch.no_grad():
                return self.read(batch.loss_taps[:, -1].to(self.output.device))
        finally:
            self.output.swap_parameters(trained)


def build_side_model(
    spec: ModelSpec, side: SideSpec, weights: WeightStore, *, device: str | torch.device = "cpu"
) -> SideModel:
    """The output layer from `weights`, and a new side network from the spec's seed.

    They are in float32 whatever the devices compute in.

    Raises:
        RecipeError: The ladder starts above the last block.
        ModelError: A weight of the output layer is missing or has the wrong shape.
    """
    spec = msgspec.structs.replace(spec, compute_dtype="float32")
    unit_count = describe(spec).unit_count
    layers = unit_count - 2
    if not 1 <= side.first_layer <= layers:
        raise RecipeError(
            f"the side network's first layer is {side.first_layer}, and the model has the layers 1 to {layers}",
            hint=f"choose one of 1 to {layers}",
        )
    output = build_stage(spec, unit_count - 1, unit_count, weights, device=device)
    network = SideNetwork(layers, config_of(spec).hidden_size, side, spec.seed).to(device)
    return SideModel(side, output, network)
