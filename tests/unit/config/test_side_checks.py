"""Settings of side-tuning that contradict each other, or the rest of a recipe."""

import pytest

from coterie.config.loading import load_recipe
from coterie.errors import RecipeError
from coterie.jobs.side_spec import SideSpec

DEVICE, SERVER = "name=phone", "name=desk,role=server"


def load(**options):
    return load_recipe(None, {"model.name": "m", "data.train": "t", "mode": "side", **options})


def test_a_recipe_says_what_devices_and_server_agree_on():
    side = load(rank=8, upload="int4", additive=True, two_phases=False).side
    assert side.spec == SideSpec(rank=8, upload="int4", mode="additive", two_phases=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"standing_link": True, "workers": 2}, "has no meaning with mode"),
        ({"mode": "pipeline", "rank": 8}, "is for side-tuning"),
        ({"mode": "pipeline", "local_workers": [DEVICE, SERVER]}, 'only a run with mode = "side" has one'),
        ({"method": "lora"}, "the network beside the model is trained"),
        ({"freeze": ["embeddings"]}, "has no effect with mode"),
        ({"task": "causal-lm", "packing": True}, "each row is cached alone"),
        ({"compute_dtype": "bfloat16"}, "side-tuning computes in float32"),
        ({"task": "causal-lm", "additive": True}, "is for classification, tagging and regression"),
        ({"local_workers": [DEVICE, SERVER, "name=other,role=server"]}, "has 2 servers"),
        ({"local_workers": [DEVICE]}, "needs a server and a device"),
        ({"workers": 1}, "needs a server and a device"),
        ({"local_workers": [DEVICE, "name=watch"]}, "has no server"),
        ({"cache_quota": "much"}, "is not a size"),
        ({"two_phases": False, "cache": "memory"}, "caches no training data"),
        ({"leave_after_collect": True}, "is for a server on another machine"),
        ({"leave_after_collect": True, "workers": 2, "cache": "memory"}, 'needs cache = "disk"'),
        ({"leave_after_collect": True, "workers": 2, "two_phases": False}, "needs two_phases"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(options, words):
    with pytest.raises(RecipeError) as caught:
        load(**options)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 2},
        {"local_workers": [DEVICE, SERVER]},
        {"local_workers": [DEVICE], "workers": 2},
        {"local_workers": [SERVER], "workers": 3, "cache_quota": "2GiB"},
        {"leave_after_collect": True, "workers": 2},
        {"workers": 1, "resume": True},
    ],
)
def test_a_server_and_devices_may_be_here_or_elsewhere(options):
    assert load(**options).train.mode == "side"


@pytest.mark.parametrize(
    ("options", "rate"),
    [({}, 1e-3), ({"mode": "pipeline"}, 5e-5), ({"learning_rate": 5e-5}, 5e-5), ({"learning_rate": 0.5}, 0.5)],
)
def test_the_default_learning_rate_is_that_of_what_is_trained(options, rate):
    assert load(**options).train.learning_rate == rate
