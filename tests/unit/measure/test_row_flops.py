"""Operations by row length: against torch's own counter on whole models, uncut."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig

from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.measure.row_flops import count_row_flops
from coterie.measure.stand_in_weights import StandInWeights
from coterie.measure.unit_cost import example_inputs, loss_of
from coterie.models import describe, load_whole_model
from coterie.models.skeleton import config_of

Make = Callable[..., ModelSpec]


def counted_by_torch(spec: ModelSpec, tokens: int) -> tuple[int, int]:
    """Forward and backward of the whole model on one row, in the kernel that torch's counter knows without help."""
    model = load_whole_model(spec, StandInWeights(spec)).train()
    counter = FlopCounterMode(display=False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), counter:
        logits = model(**example_inputs(1, tokens)).logits
        forward = counter.get_total_flops()
        torch.autograd.backward(loss_of(logits))
    return forward, counter.get_total_flops() - forward


def test_any_length_is_counted_as_torch_counts_the_whole_model(bert: Make, llama: Make) -> None:
    tokens = 40
    # Without dropout the fused kernel runs: it keeps no scores, and its backward makes them again, in 4 blocks here.
    for spec, again in ((bert(), 0), (llama(), 4)):
        forward, backward = counted_by_torch(spec, tokens)
        flops = count_row_flops(spec)
        assert flops.forward([tokens]) == forward
        assert flops.training([tokens]) == forward + backward + again * 2 * tokens * tokens * 32


def test_rows_add_up_and_the_device_may_leave_the_output_layer_out(bert: Make) -> None:
    flops = count_row_flops(bert())
    classifier = 2 * 32 * 9
    assert flops.forward([5, 9]) == flops.forward([5]) + flops.forward([9])
    assert flops.forward([5, 9], with_output_layer=False) == flops.forward([5, 9]) - classifier * (5 + 9)


def test_a_layer_that_sees_one_position_of_a_row_costs_the_same_at_any_length(bert: Make) -> None:
    config = BertConfig(**{**config_of(bert()).to_dict(), "num_labels": 3})
    spec = ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForSequenceClassification")
    output = count_row_flops(spec).units[-1].forward
    assert (output.constant, output.per_token, output.per_token_squared) == (2 * 32 * 32 + 2 * 32 * 3, 0, 0)


def test_lora_and_bitfit_cost_less_backward_than_full_fine_tuning(bert: Make) -> None:
    anatomy = describe(bert())
    matrices = tuple(name for name in anatomy.unit_of if not name.endswith(".bias") and "classifier" not in name)
    targets = tuple(f"bert.encoder.layer.{i}.attention.self.{p}" for i in range(4) for p in ("query", "value"))
    full = count_row_flops(bert())
    bitfit = count_row_flops(bert(frozen=matrices))
    lora = count_row_flops(bert(lora=LoraSpec(rank=2, target_modules=targets, modules_to_save=("classifier",))))
    lengths = [16] * 3
    assert full.forward(lengths) == bitfit.forward(lengths)
    # Each adapter adds two products of rank 2 to the forward.
    assert lora.forward(lengths) == full.forward(lengths) + 3 * 16 * len(targets) * 2 * (32 * 2 + 2 * 32)
    weights = 4 * (4 * 32 * 32 + 2 * 32 * 64)
    first_projections = 3 * 32 * 32  # nothing below the first block wants their inputs' gradients
    assert bitfit.training(lengths) <= full.training(lengths) - 3 * 16 * 2 * weights
    assert bitfit.training(lengths) >= full.training(lengths) - 3 * 16 * 2 * (weights + first_projections)
    assert lora.forward(lengths) < lora.training(lengths) < full.training(lengths)
