import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ProtocolError
from coterie.sidetuning.activations import ActivationBatch, join_layers, join_rows


def made_up(counts, *, all_tokens, labelled=True, layers=(1, 3), seed=0, first_id=10):
    """Distinct activations; with `all_tokens` some of them enter the loss."""
    draw = torch.Generator().manual_seed(seed)
    total = sum(counts)
    loss_index = torch.rand(total, generator=draw).lt(0.5).nonzero().squeeze(1) if all_tokens else None
    terms = total if loss_index is None else len(loss_index)
    return ActivationBatch(
        samples=torch.arange(first_id, first_id + len(counts)),
        counts=torch.tensor(counts, dtype=torch.int64),
        layers=layers,
        taps=torch.randn(total, len(layers), 2, generator=draw),
        labels=torch.arange(terms) + 100 * first_id if labelled else None,
        loss_index=loss_index,
    )


def same(one, other):
    def equal(a, b):
        return a is None and b is None if a is None or b is None else torch.equal(a, b)

    return one.layers == other.layers and all(
        equal(getattr(one, name), getattr(other, name))
        for name in ("samples", "counts", "taps", "labels", "loss_index")
    )


COUNTS = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(COUNTS, st.booleans(), st.booleans(), st.integers(0, 1000))
def test_rows_that_are_split_and_joined_are_what_they_were(counts, all_tokens, labelled, seed):
    batch = made_up(counts, all_tokens=all_tokens, labelled=labelled, seed=seed)
    assert same(join_rows(batch.split()), batch)


@given(COUNTS, st.booleans(), st.integers(0, 1000), st.data())
def test_picked_rows_are_those_rows_in_that_order(counts, all_tokens, seed, data):
    batch = made_up(counts, all_tokens=all_tokens, seed=seed)
    rows = data.draw(st.lists(st.integers(0, len(counts) - 1), min_size=1, max_size=6))
    single = batch.split()
    assert same(batch.pick(rows), join_rows([single[row] for row in rows]))


@given(COUNTS, COUNTS, st.booleans())
def test_the_loss_tokens_of_joined_batches_are_those_of_their_parts(first, second, all_tokens):
    parts = [made_up(first, all_tokens=all_tokens), made_up(second, all_tokens=all_tokens, seed=1, first_id=30)]
    joined = join_rows(parts)
    assert torch.equal(joined.loss_taps, torch.cat([part.loss_taps for part in parts]))
    assert joined.loss_counts.tolist() == [count for part in parts for count in part.loss_counts.tolist()]
    assert int(joined.loss_counts.sum()) == joined.loss_tokens
    assert (joined.rows, joined.tokens) == (len(first) + len(second), sum(first) + sum(second))


def test_stages_parts_join_by_layer_and_labels_come_from_whichever_has_them():
    low = made_up([2, 0, 1], all_tokens=False, layers=(1, 2), labelled=False)
    high = made_up([2, 0, 1], all_tokens=False, layers=(3,), seed=1)
    joined = join_layers([high, low])
    assert joined.layers == (1, 2, 3)
    assert torch.equal(joined.taps, torch.cat([low.taps, high.taps], dim=1))
    assert torch.equal(joined.labels, high.labels)


def test_parts_that_do_not_belong_together_are_refused():
    batch = made_up([2, 1], all_tokens=False)
    with pytest.raises(ProtocolError, match="different rows"):
        join_layers([batch, made_up([2, 1], all_tokens=False, layers=(4,), first_id=50)])
    with pytest.raises(ProtocolError, match="different rows"):
        join_layers([batch, made_up([1, 2], all_tokens=False, layers=(4,))])
    with pytest.raises(ProtocolError, match="do not ascend"):
        join_layers([batch, batch])
    with pytest.raises(ProtocolError, match="different models"):
        join_rows([batch, made_up([1], all_tokens=False, layers=(1, 2))])
    with pytest.raises(ProtocolError, match="only some"):
        join_rows([batch, made_up([1], all_tokens=False, labelled=False)])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"counts": torch.tensor([2])}, "counts of shape"),
        ({"counts": torch.tensor([4, -1])}, "tensor of shape"),
        ({"counts": torch.tensor([2, 2])}, "4 tokens of 2 layers"),
        ({"layers": (1, 2, 3)}, "3 tokens of 3 layers"),
        ({"layers": (3, 1)}, "do not ascend"),
        ({"taps": torch.zeros(3, 2)}, "tensor of shape"),
        ({"labels": torch.zeros(2)}, "2 labels for 3 loss tokens"),
        ({"loss_index": torch.tensor([0, 1, 3])}, "not among the 3"),
        ({"loss_index": torch.tensor([0, 2, 1])}, "not among the 3"),
        ({"loss_index": torch.tensor([-1, 1, 2])}, "not among the 3"),
        ({"loss_index": torch.zeros(1, 1, dtype=torch.long)}, "index of loss tokens"),
    ],
)
def test_activations_that_contradict_themselves_are_refused(change, problem):
    with pytest.raises(ProtocolError, match=problem):
        msgspec.structs.replace(made_up([2, 1], all_tokens=False), **change)
