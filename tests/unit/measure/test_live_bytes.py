import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from coterie.measure.live_bytes import LiveBytes, SavedBytes

KIB = 1024


def test_a_storage_saved_twice_counts_once_and_parameters_do_not_count() -> None:
    linear = nn.Linear(256, 256)
    hidden = torch.zeros(4, 256, requires_grad=True)
    saved = SavedBytes(linear.parameters())
    with saved.hooks():
        output = linear(hidden) + linear(hidden)
    assert saved.total_bytes == 4 * 256 * 4
    assert output.requires_grad


def test_a_frozen_layer_saves_no_input() -> None:
    linear = nn.Linear(256, 256).requires_grad_(False)
    saved = SavedBytes(linear.parameters())
    with saved.hooks():
        linear(torch.zeros(4, 256, requires_grad=True))
    assert saved.total_bytes == 0


def test_a_backward_through_watched_saves_gives_the_same_gradient() -> None:
    x = torch.arange(4.0, requires_grad=True)
    saved = SavedBytes([])
    with saved.hooks():
        y = (x * x).sum()
    saved.forget()
    y.backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_live_bytes_follow_what_is_alive_and_the_peak_stays() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(KIB, dtype=torch.uint8)
        torch.ones(3 * KIB, dtype=torch.uint8)
        assert live.now_bytes == KIB
        assert live.peak_bytes == 4 * KIB
        assert live.mark() == KIB
        assert live.peak_bytes == KIB
        view = kept.view(2, -1)
        assert live.now_bytes == KIB
        del kept, view
        assert live.now_bytes == 0


def test_ignored_tensors_do_not_count_when_an_operation_returns_them() -> None:
    own = torch.zeros(KIB, dtype=torch.uint8)
    with LiveBytes() as live:
        live.ignore([own])
        own.view(-1)
        own.add_(1)
        assert live.peak_bytes == 0


def test_real_and_fake_tensors_give_the_same_figures() -> None:
    def figures() -> tuple[int, int]:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        hidden = torch.zeros(2, 16, 32, requires_grad=True)
        saved = SavedBytes(layer.parameters())
        with LiveBytes() as live:
            live.ignore([*layer.parameters(), hidden])
            with saved.hooks():
                output = layer(hidden)
            total = saved.total_bytes
            saved.forget()
            live.mark()
            output.backward(torch.ones_like(output))
        return total, live.peak_bytes

    with FakeTensorMode():
        fake = figures()
    assert fake == figures()
    assert fake[0] > 0


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_on_fake_tensors_saves_what_the_cpu_kernel_saves(dropout: float) -> None:
    def figure() -> int:
        q, k, v = (torch.zeros(2, 4, 64, 16, requires_grad=True) for _ in range(3))
        saved = SavedBytes([])
        with saved.hooks():
            torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return saved.total_bytes

    with FakeTensorMode():
        fake = figure()
    assert fake == figure()
