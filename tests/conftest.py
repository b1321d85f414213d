"""What holds for every test."""

import pytest
import torch
from hypothesis import settings

# The same examples on every run: main passes or fails by its code alone.
# `--hypothesis-profile=search` looks for new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("search", derandomize=False)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random weights and inputs are the same on every run too, whichever tests ran before."""
    torch.manual_seed(0)
