"""Groups of prompts: what is fed, and when a row or all of them are done."""

import numpy as np
import pytest

from coterie.coordinator.prompt_groups import PromptGroup, Prompts
from coterie.jobs.generation_spec import GenerationSpec
from coterie.tasks.examples import Example

STOP, PAD = 9, 0


def make_prompts(*lengths: int, most: int = 4) -> Prompts:
    return Prompts(
        examples=tuple(Example() for _ in lengths),
        ids=tuple(np.arange(1, length + 1) for length in lengths),
        stop_ids=frozenset({STOP}),
        pad_id=PAD,
        spec=GenerationSpec(max_new_tokens=most),
    )


def one_group(*lengths: int, most: int = 4) -> PromptGroup:
    (group,) = make_prompts(*lengths, most=most).groups(len(lengths))
    return group


def test_every_row_is_in_one_group_and_the_longest_come_first():
    groups = make_prompts(2, 5, 1, 4, 3).groups(2)
    assert [group.rows for group in groups] == [(1, 3), (4, 0), (2,)]
    assert [group.number for group in groups] == [0, 1, 2]


def test_prompts_are_padded_on_the_left():
    ids, mask = one_group(3, 1).start()
    assert ids.tolist() == [[1, 2, 3], [PAD, PAD, 1]]
    assert mask is not None
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_prompts_of_one_length_have_no_mask():
    assert one_group(2, 2).start()[1] is None


def test_a_row_that_has_stopped_is_continued_by_padding_and_keeps_its_stop():
    group = one_group(1, 1)
    group.take(np.array([7, STOP]))
    assert group.newest.tolist() == [[7], [STOP]]
    group.take(np.array([8, 5]))
    assert group.newest.tolist() == [[8], [PAD]]
    assert group.generated == ([7, 8], [STOP])
    assert not group.is_done


@pytest.mark.parametrize("tokens", [[(STOP, 3), (4, STOP)], [(3, 3)] * 4])
def test_a_group_is_done_when_all_rows_have_stopped_or_the_limit_is_reached(tokens):
    group = one_group(1, 1)
    for step in tokens:
        assert not group.is_done
        group.take(np.array(step))
    assert group.is_done


def test_without_stop_ids_only_the_limit_ends_a_group():
    group = one_group(1, most=2)
    group._prompts = make_prompts(1, most=2)
    group.take(np.array([3]))
    assert not group.is_done
    group.take(np.array([3]))
    assert group.is_done
