"""Logging set up in one place: quiet by default, to the standard error, secrets removed."""

import logging
import re

_SECRET = re.compile(r"(token=|#)[A-Za-z0-9_\-]{8,}")


class _Redact(logging.Filter):
    """Replaces join tokens: a log is often pasted into a bug report."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = _SECRET.sub(r"\1…", record.getMessage())
        record.args = ()
        return True


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; pass `__name__`."""
    return logging.getLogger(name)


def configure(*, verbose: bool) -> None:
    """Send this project's log lines to the standard error; `verbose` shows all, else warnings only."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    handler.addFilter(_Redact())
    root = logging.getLogger("coterie")
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.WARNING)
    root.propagate = False
