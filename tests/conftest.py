"""What holds for every test."""

import faulthandler
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples on every run: main passes or fails by its code alone, and not by how busy the machine is.
# `--hypothesis-profile=search` looks for new ones.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, max_examples=60, **PATIENT)
settings.register_profile("search", derandomize=False, max_examples=1000, **PATIENT)
settings.load_profile("same")

TESTS = Path(__file__).parent
STDERR = pytest.StashKey[int]()
HANGS_S = 120
"""Beyond a test's own limit, until its process is ended."""


@pytest.fixture(scope="session", autouse=True)
def _own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Identities and known devices of tests are not the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_CONFIG", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """What a command of the program sets up for its process ends with the test that gave it."""
    logger = logging.getLogger("coterie")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def pytest_configure(config: pytest.Config) -> None:
    """Keep the way to the terminal for stacks of a test that hangs: what is written while it runs is captured."""
    config.stash[STDERR] = os.dup(2)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Random weights and inputs are the same on every run too, whichever tests ran before."""
    import torch  # noqa: PLC0415 - the process that hands tests out to others needs none

    torch.manual_seed(0)
    limit = item.get_closest_marker("timeout")
    if limit is not None:  # else `faulthandler_timeout`, which is one for all, would end it before its limit
        faulthandler.dump_traceback_later(limit.args[0] + HANGS_S, file=item.config.stash[STDERR], exit=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first: with two processes, no long one is then left for the end."""
    folders = ("integration", "numerics", "contract", "cli")
    last = len(folders)

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(TESTS).parts[0]
        return folders.index(folder) if folder in folders else last

    items.sort(key=rank)
    # Half a million objects of imported libraries stay: no garbage collection needs to look at them again.
    gc.collect()
    gc.freeze()
