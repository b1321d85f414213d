"""Asking for a device that is not there, and what is kept of one that is."""

import pytest
import torch
from transformers import BertConfig

from coterie.clock import FakeClock
from coterie.cluster.messages import ProfileRequest
from coterie.errors import UsageError
from coterie.ids import WorkerId
from coterie.jobs.model_spec import ModelSpec
from coterie.measure.model_profile import profile_model
from coterie.worker.device import measured_device, require_device
from coterie.worker.settings import WorkerSettings


def test_every_machine_has_a_cpu():
    require_device("cpu")


def test_a_device_that_is_not_there_is_a_mistake_of_the_command_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    with pytest.raises(UsageError, match=r"no cuda device on this machine \(it has cpu.*xpu\)"):
        require_device("cuda")
    require_device("xpu")


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A request for a tiny model, answered at a given time; later answers may come from the cache."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    config = BertConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=2
    )
    spec = ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForTokenClassification")
    model = profile_model(spec, memory_tokens=4, typical_tokens=4, name="tiny")

    def ask(at_s, *, again=False):
        request = ProfileRequest(spec=spec, model=model, rows=(1, 2), again=again)
        return measured_device(WorkerSettings(name="board"), request, WorkerId("board"), FakeClock(at_s))

    return ask


def test_figures_are_kept_with_their_date_until_somebody_asks_to_measure_again(asked):
    first = asked(1000.0)
    assert (first.age_s, first.profile.measured_at_s) == (0.0, 1000.0)
    kept = asked(1600.0)
    assert (kept.age_s, kept.profile.measured_at_s) == (600.0, 1000.0)
    assert kept.profile.timings == first.profile.timings
    anew = asked(1700.0, again=True)
    assert (anew.age_s, anew.profile.measured_at_s) == (0.0, 1700.0)
    assert asked(1701.0).profile.measured_at_s == 1700.0
