"""Keeping the data local: what a recipe must say for it."""

import pytest

from coterie.config.loading import load_recipe
from coterie.errors import RecipeError

FIRST, LAST = "name=first", "name=last"


def load(**options):
    return load_recipe(None, {"model.name": "m", "data.train": "t", "keep_data_local": True, **options})


def test_two_local_workers_hold_the_ends():
    recipe = load(workers=3, local_workers=[FIRST, LAST])
    assert recipe.plan.keep_data_local
    assert recipe.cluster.listen_host != "127.0.0.1"  # others are to join


def test_without_any_other_device_nothing_is_asked_for():
    assert load().plan.keep_data_local


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 3}, "needs two local workers, one for the first and one for the last stage; there are 0"),
        ({"workers": 3, "local_workers": [FIRST]}, "there is 1"),
        ({"mode": "side", "workers": 2}, "whose server trains on labels"),
    ],
)
def test_what_cannot_keep_them_is_refused_with_the_reason(options, words):
    with pytest.raises(RecipeError) as caught:
        load(**options)
    assert "--keep-data-local" in caught.value.message
    assert words in caught.value.message
