"""`import coterie` is quick and has the functions all the same."""

import subprocess
import sys

import pytest

import coterie
from coterie import api


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = (
        "import sys, coterie; print(sorted({'torch', 'numpy', 'transformers', 'coterie.api'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["evaluate", "finetune", "predict", "train"])
def test_the_front_doors_are_there(name: str) -> None:
    assert getattr(coterie, name) is getattr(api, name)
    assert name in coterie.__all__


def test_other_names_are_no_part_of_it() -> None:
    with pytest.raises(AttributeError, match="'coterie' has no attribute 'sing'"):
        coterie.sing  # noqa: B018 - the access is what fails
