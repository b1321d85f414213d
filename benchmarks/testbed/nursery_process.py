"""Has imported everything that `coterie` needs, and forks a program from itself for each that is asked for.

    python nursery_process.py

A run over four processes spends more on importing torch and transformers four times than on training a tiny model.
Reads commands from standard input and answers each, one JSON object a line:

    {"do": "start", "words": ["worker", …], "environment": {…}, "log": "/…/output.log"} -> {"pid": 4711}
    {"do": "look", "pid": 4711}                                  -> {"code": 0}, or {} while it runs

A program so begun is a process of its own in a session of its own; its main function is that of `python -m coterie`.
"""

import gc
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

PRELOADED = (
    "coterie.cli.main",
    "coterie.api",
    "coterie.cli.console",
    "coterie.metrics.summary",
    "coterie.metrics.plot",
    "coterie.worker.program",
    "coterie.coordinator.preflight",
    "transformers.models.bert.modeling_bert",
    "transformers.tokenization_utils_base",
    "peft",
)


def main() -> None:
    """Serve until standard input ends; programs that still run then are killed: whoever wanted them is gone."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child's collections must not touch, and so copy, what all share
    started: list[int] = []
    ended: dict[int, int] = {}
    for line in sys.stdin:
        wish = json.loads(line)
        answer: dict[str, int] = {}
        if wish["do"] == "start":
            started.append(_fork(wish["words"], wish["environment"], Path(wish["log"])))
            answer = {"pid": started[-1]}
        else:
            _reap(ended)
            if wish["pid"] in ended:
                answer = {"code": ended[wish["pid"]]}
        print(json.dumps(answer), flush=True)
    _reap(ended)
    for pid in set(started) - ended.keys():
        os.kill(pid, signal.SIGKILL)


def _fork(words: list[str], environment: dict[str, str], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = _become(words, environment, log)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)
    raise AssertionError("a child went on")


def _become(words: list[str], environment: dict[str, str], log: Path) -> int:
    """What `python -m coterie WORDS` would do; its exit code."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    sys.argv = ["coterie", *words]
    return int(sys.modules["coterie.cli.main"].main(words))


def _leave(code: int) -> NoReturn:
    """As the interpreter's own end, without the nursery's leftovers."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _reap(ended: dict[int, int]) -> None:
    """Note who has ended meanwhile."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        ended[pid] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
