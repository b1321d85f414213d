"""The recipe as flags of a parser."""

import argparse

import pytest

from coterie.config import add_recipe_flags, load_recipe, overrides_from


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(prog="coterie train", allow_abbrev=False)
    parser.add_argument("recipe", nargs="?")
    add_recipe_flags(parser)
    return parser


def test_only_flags_that_were_given_become_overrides(parser):
    assert overrides_from(parser.parse_args(["recipe.toml"])) == {}
    args = parser.parse_args(["--epochs", "3", "recipe.toml", "--objective", "memory"])
    assert overrides_from(args) == {"train.epochs": "3", "plan.objective": "memory"}


def test_switches_can_be_set_and_unset(parser):
    args = parser.parse_args(["--lossy-links", "--no-evaluate-every-epoch"])
    assert overrides_from(args) == {"plan.lossy_links": True, "run.evaluate_every_epoch": False}


def test_lists_are_repeated_flags(parser):
    args = parser.parse_args(["--cuts", "2", "--cuts", "4", "--local-worker", "speed=0.5", "--freeze", "embeddings"])
    given = overrides_from(args)
    assert given["plan.cuts"] == ["2", "4"]
    recipe = load_recipe(None, given | {"model": "m", "train": "t", "workers": 3})
    assert recipe.plan.cuts == (2, 4)
    assert recipe.cluster.local_workers[0].speed == 0.5
    assert recipe.train.freeze == ("embeddings",)


def test_lists_may_be_given_with_commas_but_a_worker_s_commas_are_its_own(parser):
    words = ["--cuts", "2,4", "--cuts=6", "--local-worker", "speed=0.5,memory=600MiB"]
    given = overrides_from(parser.parse_args(words))
    assert given == {"plan.cuts": ["2", "4", "6"], "cluster.local_workers": ["speed=0.5,memory=600MiB"]}


def test_help_shows_description_choices_and_default(parser):
    text = " ".join(parser.format_help().split())
    assert "--schedule {flush,gpipe,stash,2bw}" in text
    assert "Rows (sentences) per optimizer step. Default: 16." in text
    assert "--allocator {auto,default,tight}" in text


def test_sections_can_be_chosen():
    parser = argparse.ArgumentParser()
    add_recipe_flags(parser, sections=("plan",))
    assert "--objective" in parser.format_help()
    assert "--epochs" not in parser.format_help()


def test_single_fields_of_other_sections_can_be_added():
    parser = argparse.ArgumentParser()
    add_recipe_flags(parser, sections=("plan",), keys=("train.batch_rows",))
    args = parser.parse_args(["--batch-rows", "4", "--objective", "memory"])
    assert overrides_from(args) == {"train.batch_rows": "4", "plan.objective": "memory"}
    with pytest.raises(SystemExit):
        parser.parse_args(["--epochs", "4"])
