import pytest

from coterie.errors import DataError
from coterie.tasks import DataFiles, get_task, sample_path
from coterie.tasks.read import read_sentences
from coterie.tasks.tag_schemes import find_entities


def test_wikigold_ships_whole_with_its_licence_and_origin():
    folder = sample_path("wikigold")
    assert "CC BY 4.0" in (folder / "LICENSE").read_text(encoding="utf-8")
    assert "Balasuriya" in (folder / "README.md").read_text(encoding="utf-8")
    for split, rows, words, entities in (
        ("train", 1354, 31734, 2812),
        ("dev", 176, 3702, 386),
        ("test", 166, 3571, 360),
    ):
        file = read_sentences(folder, split=split)
        assert (file.scheme, file.repaired_tags) == ("IOB2", 0)
        assert len(file.sentences) == rows
        assert sum(len(sentence.words) for sentence in file.sentences) == words
        assert sum(len(find_entities(sentence.tags)) for sentence in file.sentences) == entities


def test_an_unknown_sample_is_refused_with_those_there_are():
    with pytest.raises(DataError, match="no sample data set is called 'conll'") as caught:
        sample_path("conll")
    assert "wikigold" in caught.value.hint


def test_a_cut_of_banking77_ships_with_every_intent_its_licence_and_origin():
    folder = sample_path("banking77")
    assert "CC BY 4.0" in (folder / "LICENSE").read_text(encoding="utf-8")
    assert "Casanueva" in (folder / "README.md").read_text(encoding="utf-8")
    data = get_task("sequence-classification").prepare(DataFiles(train=folder))
    assert {name: len(split.examples) for name, split in data.splits.items()} == {
        "train": 1386,
        "dev": 231,
        "test": 383,
    }
    assert data.task.labels == tuple((folder / "labels.txt").read_text(encoding="utf-8").split())
    for split in data.splits.values():
        assert {example.label for example in split.examples} == set(data.task.labels)
