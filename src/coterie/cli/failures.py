"""How a verb's failure reaches the user: two lines on the standard error or one JSON object, and an exit code."""

import sys
import traceback

import msgspec

from coterie.errors import CoterieError, InterruptedRunError

INTERNAL_SLUG = "internal"
INTERNAL_EXIT_CODE = 70
"""A mistake of this program (BSD's EX_SOFTWARE), never of its user."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it is shown."""

    slug: str
    message: str
    hint: str
    exit_code: int


def failure_of(error: BaseException) -> Failure:
    """What to show for any exception that ended a verb."""
    match error:
        case CoterieError():
            return Failure(slug=error.slug, message=error.message, hint=error.hint, exit_code=error.exit_code)
        case KeyboardInterrupt():
            interrupted = InterruptedRunError
            return Failure(slug=interrupted.slug, message="stopped by Ctrl-C", hint="", exit_code=interrupted.exit_code)
        case _:
            return Failure(
                slug=INTERNAL_SLUG,
                message=f"{type(error).__name__}: {error}",
                hint="this is a mistake in coterie: please report it with the output of the same command and --verbose",
                exit_code=INTERNAL_EXIT_CODE,
            )


def report(error: BaseException, *, as_json: bool, verbose: bool) -> int:
    """Show an error and return the exit code that belongs to it."""
    failure = failure_of(error)
    if verbose and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error, file=sys.stderr)
    if as_json:
        print(msgspec.json.encode({"error": failure}).decode())
    else:
        print(f"error [{failure.slug}]: {failure.message}", file=sys.stderr)
        if failure.hint:
            print(f"try: {failure.hint}", file=sys.stderr)
    return failure.exit_code
