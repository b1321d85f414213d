"""Asking for a device that is not there."""

import pytest
import torch

from coterie.errors import UsageError
from coterie.worker.device import require_device


def test_every_machine_has_a_cpu():
    require_device("cpu")


def test_a_device_that_is_not_there_is_a_mistake_of_the_command_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    with pytest.raises(UsageError, match=r"no cuda device on this machine \(it has cpu.*xpu\)"):
        require_device("cuda")
    require_device("xpu")
