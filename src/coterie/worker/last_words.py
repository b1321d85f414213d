"""What a worker tells the coordinator when it ends by an error."""

from coterie.cluster.messages import Failed
from coterie.errors import CoterieError, NonFiniteLossError, OutOfMemoryError
from coterie.logs import get_logger
from coterie.measure.process_memory import is_out_of_memory

log = get_logger(__name__)


def failed(error: CoterieError) -> Failed:
    """The message that reports `error`."""
    step, micro_batch = (error.step, error.micro_batch) if isinstance(error, NonFiniteLossError) else (-1, -1)
    return Failed(slug=error.slug, message=error.message, hint=error.hint, step=step, micro_batch=micro_batch)


def without_frames(error: CoterieError) -> CoterieError:
    """The same error, letting go of the frames that it went through, and of what their variables hold.

    A stage's compute thread refers to all its weights there; they would outlive the stage as long as its error is kept.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:  # an error that is raised again may become its cause's cause
        seen.add(id(link))
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def explained(error: BaseException) -> CoterieError:
    """Any exception as one of ours: memory that ran out is known as such, all else is a bug."""
    if isinstance(error, CoterieError):
        return error
    if is_out_of_memory(error):
        return OutOfMemoryError(f"memory ran out: {error}", hint="give the device more memory")
    log.error("a task of the worker failed", exc_info=error)
    return CoterieError(f"{type(error).__name__}: {error}", hint="this is a bug: please report it")
