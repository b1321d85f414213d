"""Small programs of the operating system that know what no library does."""

import shutil
import subprocess

LIMIT_S = 5.0


def output_of(command: tuple[str, ...], limit_s: float = LIMIT_S) -> str | None:
    """What the program prints; None if it is absent, fails, or does not end within `limit_s`."""
    path = shutil.which(command[0])
    if path is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - programs named in this package, no shell
            [path, *command[1:]],
            check=False,
            capture_output=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
