"""What the probe must notice, on models made for it: each differs from a plain chain of blocks in one way."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from coterie.errors import UnsupportedModelError
from coterie.models.probe import AFTER, BEFORE, probe
from coterie.models.skeleton import find_blocks

Body = Callable[["Chain", torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        result = self.linear(hidden_states)
        return result if extra is None else result + extra


class Chain(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Embedding(5, 8)
        self.positions.weight.requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)
        self._body = body

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        embedded = self.embedding(input_ids)
        return SimpleNamespace(logits=self.head(self._body(self, embedded, input_ids)))


def plain(model: Chain, hidden: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        hidden = block(hidden)
    return hidden


def tuples(model: Chain, hidden: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        hidden = block(hidden)[0]
    return hidden


def pairs(model: Chain, hidden: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        hidden, _state = block(hidden)
    return hidden


def around(model: Chain, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return plain(model, hidden, ids) + hidden


def skip(model: Chain, hidden: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    first = model.blocks[0](hidden)
    second = model.blocks[1](first)
    return model.blocks[2](first + second)


def shared(model: Chain, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return model.blocks[0](plain(model, hidden, ids))


def left_out(model: Chain, hidden: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    return model.blocks[2](model.blocks[0](hidden))


def positions(model: Chain, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        hidden = block(hidden, extra=model.positions(ids * 0))
    return hidden


def empty(body: Body) -> Chain:
    with torch.device("meta"):
        return Chain(body)


@pytest.mark.parametrize(("body", "form"), [(plain, "tensor"), (tuples, "tuple"), (pairs, "pair")])
def test_the_form_in_which_a_loop_takes_results_is_found(body: Body, form: str) -> None:
    model = empty(body)
    blocks = list(model.blocks)
    seen = probe(model, find_blocks(model)[1])  # type: ignore[arg-type]
    assert seen.form == form
    assert seen.phases["embedding.weight"] == {BEFORE}
    assert seen.phases["head.bias"] == {AFTER}
    assert list(model.blocks) == blocks
    assert not model.positions.weight.requires_grad


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (around, "from before its blocks again after them"),
        (skip, "more than hidden states past block 1"),
        (shared, "several times"),
        (left_out, r"order \[0, 2\]"),
        (positions, "made of parameters"),
    ],
)
def test_what_goes_around_the_blocks_is_refused(body: Body, reason: str) -> None:
    model = empty(body)
    with pytest.raises(UnsupportedModelError, match=reason):
        probe(model, find_blocks(model)[1])  # type: ignore[arg-type]


def told_the_ids(model: Chain, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        hidden = block(hidden, extra=(ids.float() - 1).unsqueeze(-1))
    return hidden


def told_their_shape(model: Chain, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids) + torch.zeros_like(ids)
    for block in model.blocks:
        hidden = block(hidden, extra=places.float().unsqueeze(-1))
    return hidden


@pytest.mark.parametrize(("body", "read"), [(plain, False), (told_their_shape, False), (told_the_ids, True)])
def test_blocks_that_are_told_token_ids_are_told_from_those_that_are_told_their_shape(body: Body, read: bool) -> None:
    model = empty(body)
    assert probe(model, find_blocks(model)[1]).blocks_read_ids == read  # type: ignore[arg-type]
