"""Files for the keepers of services: each is what its system reads, and none holds a secret."""

import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from xml.etree import ElementTree as ET

import msgspec
import pytest

from coterie.worker.service_files import WorkerService, launchd_plist, systemd_unit, windows_task

AWKWARD = 'my "100 %" $HOME <box> & co\\'
VARIABLES = (("COTERIE_CONFIG", AWKWARD), ("COTERIE_CACHE", "/cache"))
SERVICE = WorkerService(
    python="/opt/coterie/bin/python3",
    flags=("--name", AWKWARD, "--memory", "2GiB"),
    link_file="/home/anna/.config/coterie/worker.link",
    log_file="/home/anna/worker.log",
)


def test_the_command_reads_the_link_from_a_file_and_waits_for_its_coordinator():
    assert SERVICE.command[:7] == (
        *("/opt/coterie/bin/python3", "-m", "coterie", "worker"),
        *("--link-file", "/home/anna/.config/coterie/worker.link", "--wait"),
    )


def test_systemd_gets_every_word_as_it_is():
    unit = systemd_unit(SERVICE)
    (line,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
    words = shlex.split(line.removeprefix("ExecStart="))
    assert tuple(word.replace("%%", "%").replace("$$", "$") for word in words) == SERVICE.command


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "python3").chmod(0o755)
    path = tmp_path / "coterie-worker.service"
    real = WorkerService(
        python=str(tmp_path / "python3"),
        flags=SERVICE.flags,
        link_file="/x",
        log_file="/y",
        environment=VARIABLES,
    )
    path.write_text(systemd_unit(real))
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(path)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if path.name in line]) == (0, [])


def test_launchd_gets_the_command_and_keeps_it_alive():
    agent = plistlib.loads(launchd_plist(SERVICE).encode())
    assert tuple(agent["ProgramArguments"]) == SERVICE.command
    assert agent["KeepAlive"] is True
    assert agent["RunAtLoad"] is True


def test_windows_gets_program_and_arguments_apart_and_begins_anew_when_it_has_ended():
    task = ET.fromstring(windows_task(SERVICE).partition("?>")[2])  # noqa: S314 - made by ourselves
    space = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    assert task.findtext(".//t:Command", namespaces=space) == SERVICE.python
    assert task.findtext(".//t:Arguments", namespaces=space) == subprocess.list2cmdline(SERVICE.command[1:])
    assert task.findtext(".//t:Interval", namespaces=space) == "PT5M"
    assert task.findtext(".//t:MultipleInstancesPolicy", namespaces=space) == "IgnoreNew"


def test_each_system_hands_the_variables_over_as_they_are():
    service = msgspec.structs.replace(SERVICE, environment=VARIABLES)
    unit = [line.removeprefix("Environment=") for line in systemd_unit(service).splitlines() if "Environment=" in line]
    words = [word.replace("%%", "%") for line in unit for word in shlex.split(line)]
    assert words == ["PYTHONUNBUFFERED=1", *(f"{name}={value}" for name, value in VARIABLES)]
    agent = plistlib.loads(launchd_plist(service).encode())
    assert agent["EnvironmentVariables"] == {"PYTHONUNBUFFERED": "1", **dict(VARIABLES)}


def test_a_windows_task_sets_the_variables_itself():
    service = msgspec.structs.replace(SERVICE, environment=VARIABLES)
    task = ET.fromstring(windows_task(service).partition("?>")[2])  # noqa: S314 - made by ourselves
    arguments = task.findtext(".//{*}Arguments")
    code = service_code(arguments)
    asked = "import os; print([os.environ[name] for name in ('COTERIE_CONFIG', 'COTERIE_CACHE')])"
    code = code.replace("from coterie.cli.main import main; sys.exit(main())", asked)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == repr([value for _, value in VARIABLES])
    assert arguments.endswith(subprocess.list2cmdline(service.words))


def service_code(arguments):
    """The second argument, as Windows takes a command line apart: quotes and backslashes escaped."""
    quoted = arguments.removeprefix('-c "')
    end = re.search(r'(?<!\\)(?:\\\\)*"', quoted).end() - 1
    return re.sub(r'(\\*)\\"', lambda found: "\\" * (len(found[1]) // 2) + '"', quoted[:end])
