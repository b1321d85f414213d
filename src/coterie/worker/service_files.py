"""A worker that starts with the machine: the file for each system's own keeper of services. Text in, text out.

No file holds the join link's token: the worker reads the link from a file that only its user can read.
"""

import plistlib
import subprocess
from typing import Literal
from xml.sax.saxutils import escape

import msgspec

ServiceSystem = Literal["systemd", "launchd", "windows"]

NAME = "coterie-worker"
LABEL = "org.coterie.worker"
"""Its name for launchd, which wants a domain in reverse."""

RESTART_S = 30
"""Pause before a worker whose run is over joins again."""

GIVE_UP_CODES = (2, 3, 9, 10)
"""Exit codes after which another start would end likewise: a wrong flag, a refused link, another version."""

STOP_S = 90
"""How long a worker may take to hand its layers over when it is stopped."""


_WITH_VARIABLES = "import os, sys; os.environ.update({!r}); from coterie.cli.main import main; sys.exit(main())"


class WorkerService(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be started.

    Attributes:
        python: The interpreter that coterie is installed for.
        flags: Of `coterie worker`.
        link_file: Holds the join link.
        log_file: Gets the output where the system keeps none.
        environment: Variables that the worker is to see beside the system's own, by name. No secrets: others may be
            able to read the file.
    """

    python: str
    flags: tuple[str, ...]
    link_file: str
    log_file: str
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The command line; it holds no secret."""
        return (self.python, "-m", "coterie", *self.words)

    @property
    def words(self) -> tuple[str, ...]:
        """Of `coterie`."""
        return ("worker", "--link-file", self.link_file, "--wait", *self.flags)


def systemd_unit(service: WorkerService) -> str:
    """A unit for the user's own systemd."""
    command = " ".join(_systemd_word(word) for word in service.command)
    codes = " ".join(map(str, GIVE_UP_CODES))
    variables = "".join(
        f"Environment={_systemd_value(f'{name}={value}')}\n"
        for name, value in (("PYTHONUNBUFFERED", "1"), *service.environment)
    )
    return f"""\
[Unit]
Description=coterie worker: lends this machine to fine-tuning runs
StartLimitIntervalSec=0

[Service]
ExecStart={command}
Restart=always
RestartSec={RESTART_S}
RestartPreventExitStatus={codes}
TimeoutStopSec={STOP_S}
UMask=0077
NoNewPrivileges=yes
{variables}
[Install]
WantedBy=default.target
"""


def launchd_plist(service: WorkerService) -> str:
    """An agent of macOS's launchd."""
    agent = {
        "Label": LABEL,
        "ProgramArguments": list(service.command),
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": STOP_S,
        "ProcessType": "Background",
        "Umask": 0o077,
        "StandardOutPath": service.log_file,
        "StandardErrorPath": service.log_file,
        "EnvironmentVariables": {"PYTHONUNBUFFERED": "1", **dict(service.environment)},
    }
    return plistlib.dumps(agent, sort_keys=False).decode("utf-8")


def windows_task(service: WorkerService) -> str:
    """A task of Windows's scheduler: it begins at logon, and anew within five minutes of its end."""
    program, *arguments = service.command
    if service.environment:  # a task has no place for variables, and cmd.exe would take some characters for its own
        arguments = ["-c", _WITH_VARIABLES.format(dict(service.environment)), *service.words]
    return f"""\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo>
    <Description>coterie worker: lends this machine to fine-tuning runs</Description>
  </RegistrationInfo>
  <Triggers>
    <LogonTrigger>
      <Enabled>true</Enabled>
      <Repetition>
        <Interval>PT5M</Interval>
        <StopAtDurationEnd>false</StopAtDurationEnd>
      </Repetition>
    </LogonTrigger>
  </Triggers>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <StartWhenAvailable>true</StartWhenAvailable>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Hidden>true</Hidden>
  </Settings>
  <Actions>
    <Exec>
      <Command>{escape(program)}</Command>
      <Arguments>{escape(subprocess.list2cmdline(arguments))}</Arguments>
    </Exec>
  </Actions>
</Task>
"""


def _systemd_word(word: str) -> str:
    """One word of ExecStart: its own quoting, specifiers and variables made harmless."""
    return _systemd_value(word.replace("$", "$$"))


def _systemd_value(word: str) -> str:
    """One word where variables are not looked for."""
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{plain}"' if set(plain) & set(" \t'\";\\") or not plain else plain
