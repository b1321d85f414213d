"""`coterie worker`: what its flags become, and which of them are refused."""

import pytest

from coterie.cli import worker
from coterie.cli.main import build_parser
from coterie.errors import UsageError


def settings_of(*flags):
    return worker._settings(build_parser().parse_args(["worker", "link", *flags]))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("torch", ("torch",)),
        ("auto", ("auto",)),
        ("torch,opencl:1", ("torch", "opencl:1")),
        ("torch+mnn+torch", ("torch", "mnn")),
    ],
)
def test_backends_are_named_with_commas_or_plus_signs(text, names):
    assert settings_of("--backends", text).backends == names


def test_a_worker_shares_nothing_unless_told_to():
    assert settings_of().backends == ("torch",)


@pytest.mark.parametrize("text", [" ", "auto,torch"])
def test_backends_that_mean_nothing_are_refused(text):
    with pytest.raises(UsageError, match="--backends"):
        settings_of("--backends", text)


def test_a_server_is_told_where_to_keep_what_it_gets(tmp_path):
    settings = settings_of("--role", "server", "--cache-folder", str(tmp_path))
    assert (settings.role, settings.cache_folder) == ("server", tmp_path)
    assert settings_of().role == "device"
    with pytest.raises(UsageError, match="--cache-folder is for a server"):
        settings_of("--cache-folder", str(tmp_path))
