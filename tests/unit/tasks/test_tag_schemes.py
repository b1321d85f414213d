import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities

from coterie.tasks.tag_schemes import find_entities, label_set, name_scheme, split_tag, to_iob2

RELAXED = settings(deadline=None, max_examples=60)  # a busy machine is no failure

TAGS = st.lists(
    st.one_of(st.just("O"), st.builds("{}-{}".format, st.sampled_from("BIES"), st.sampled_from(["PER", "LOC", "x-y"]))),
    max_size=12,
)


@RELAXED
@given(TAGS)
def test_entities_are_those_that_seqeval_finds_for_any_sequence_of_tags(tags):
    ours = [(entity.type, entity.start, entity.stop - 1) for entity in find_entities(tags)]
    assert ours == get_entities(tags)


@RELAXED
@given(TAGS)
def test_writing_tags_in_iob2_keeps_the_entities_and_is_stable(tags):
    iob2 = to_iob2(tags)
    assert find_entities(iob2) == find_entities(tags)
    assert to_iob2(iob2) == iob2


def test_iob1_becomes_iob2():
    iob1 = ["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-ORG"]
    assert name_scheme([iob1]) == "IOB1"
    assert to_iob2(iob1) == ("B-PER", "I-PER", "B-PER", "O", "B-LOC", "B-ORG")


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["B-X", "M-X", "E-X", "S-X", "S-X"], ("B-X", "I-X", "I-X", "B-X", "B-X")),
        (["B-X", "I-X", "L-X", "U-X", "O"], ("B-X", "I-X", "I-X", "B-X", "O")),
        (["B-X", "E-X", "I-X"], ("B-X", "I-X", "B-X")),
    ],
)
def test_iobes_bilou_and_bmes_become_iob2(tags, expected):
    assert to_iob2(tags) == expected


def test_a_file_with_a_needless_b_and_a_stray_i_is_iob2_with_mistakes():
    assert name_scheme([["B-PER", "O", "I-LOC"]]) == "IOB2"
    assert name_scheme([["B-PER", "I-PER"]]) == "IOB2"
    assert name_scheme([["O", "S-PER"]]) == "IOBES"


@pytest.mark.parametrize("tag", ["0", "B", "B-", "PER", "b-PER", "X-PER", "B_PER", "PER-B", "", "o", "-", "OO"])
def test_a_tag_of_no_known_scheme_is_not_understood(tag):
    assert split_tag(tag) is None


def test_types_may_hold_dashes():
    assert split_tag("B-creative-work") == ("B", "creative-work")


def test_the_label_set_starts_with_o_and_has_both_tags_of_every_type():
    assert label_set(["B-PER", "O", "I-LOC"]) == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert label_set([]) == ("O",)
