"""`coterie worker`: what its flags become, and which of them are refused."""

import pytest

from coterie.cli import worker
from coterie.cli.main import build_parser
from coterie.errors import UsageError
from coterie.worker.conditions import OwnerConditions


def settings_of(*flags):
    return worker.settings_from(build_parser().parse_args(["worker", "link", *flags]))


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


def test_without_flags_the_owner_lends_all_but_the_last_fifth_of_the_battery():
    settings = settings_of()
    assert settings.terms == OwnerConditions(min_battery=0.2)
    assert (settings.battery, settings.keep_awake, settings.watts, settings.memory_file) == ("auto", True, None, None)


def test_the_owners_terms_become_settings(tmp_path):
    file = tmp_path / "memory"
    flags = [
        "--only-on-power",
        "--min-battery",
        "35%",
        "--max-celsius",
        "70",
        "--cpu-share",
        "50%",
        "--yield",
        "--yield-share",
        "10%",
    ]
    flags += ["--battery", "simulated:80%,-2%/min", "--watts", "12", "--no-keep-awake", "--memory-file", str(file)]
    settings = settings_of(*flags, "--speed", "0.5")
    assert settings.terms == OwnerConditions(
        only_on_power=True, min_battery=0.35, max_celsius=70.0, share=0.5, yields_to=0.1
    )
    assert settings.full_speed == 0.25
    assert (settings.battery, settings.watts) == ("simulated:80%,-2%/min", 12.0)
    assert (settings.keep_awake, settings.memory_file) == (False, file)


@pytest.mark.parametrize(
    "flags",
    [
        ("--min-battery", "20"),
        ("--min-battery", "120%"),
        ("--cpu-share", "0%"),
        ("--yield", "--yield-share", "half"),
        ("--watts", "0"),
        ("--battery", "solar"),
    ],
)
def test_terms_that_mean_nothing_are_refused_by_their_flag(flags):
    with pytest.raises(UsageError, match=flags[-2]):
        settings_of(*flags)


def test_a_memory_file_that_holds_no_size_is_refused_at_once(tmp_path):
    file = tmp_path / "memory"
    file.write_text("a lot")
    with pytest.raises(UsageError, match="a lot"):
        settings_of("--memory-file", str(file))
