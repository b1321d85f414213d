import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from coterie.tasks import cross_entropy
from coterie.tasks.cross_entropy import cross_entropy_sum


def both(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and gradient, ours and PyTorch's."""
    found = []
    for function in (cross_entropy_sum, plain):
        own = logits.clone().requires_grad_()
        loss = function(own, labels)
        (gradient,) = torch.autograd.grad(loss * 0.25, own)
        found += [loss.detach(), gradient]
    return tuple(found)  # type: ignore[return-value]


def plain(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**20))
def test_loss_and_gradient_are_those_of_pytorch(rows: int, tokens: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, tokens, width, generator=generator) * 3
    labels = torch.randint(0, width, (rows, tokens), generator=generator)
    labels[torch.rand(rows, tokens, generator=generator) < 0.3] = -100

    loss, gradient, expected_loss, expected_gradient = both(logits, labels)

    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-5)


def test_many_slices_give_what_one_gives(monkeypatch) -> None:
    logits, labels = torch.randn(5, 7, 11), torch.randint(0, 11, (5, 7))
    whole = both(logits, labels)
    monkeypatch.setattr(cross_entropy, "_SLICE_ELEMENTS", 30)

    sliced = both(logits, labels)

    torch.testing.assert_close(sliced[0], whole[0])
    torch.testing.assert_close(sliced[1], whole[1], atol=1e-7, rtol=1e-6)


def test_rows_with_one_label_each_are_taken_too() -> None:
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, -100, 1])

    loss, gradient, expected_loss, expected_gradient = both(logits, labels)

    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradient, expected_gradient)


def test_without_labels_the_loss_is_zero_and_no_gradient_is_left_whatever_the_logits() -> None:
    logits = torch.full((1, 3, 4), float("inf"), requires_grad=True)

    loss = cross_entropy_sum(logits, torch.full((1, 3), -100))
    (gradient,) = torch.autograd.grad(loss, logits)

    assert loss.item() == 0.0
    assert not gradient.any()


def test_bfloat16_logits_are_summed_in_float32_and_keep_their_type_in_the_gradient() -> None:
    logits = torch.randn(2, 9, 50).bfloat16().requires_grad_()
    labels = torch.randint(0, 50, (2, 9))

    loss = cross_entropy_sum(logits, labels)
    (gradient,) = torch.autograd.grad(loss, logits)

    assert loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(loss, plain(logits, labels))


def test_the_logits_stay_what_they_are() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    before = logits.detach().clone()

    cross_entropy_sum(logits, torch.zeros(2, 3, dtype=torch.long)).backward()

    assert torch.equal(logits.detach(), before)
