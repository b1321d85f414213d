"""Which losses of workers a run can bear."""

from coterie.coordinator.inbox import Inbox
from coterie.coordinator.member import Loss
from coterie.errors import (
    CoterieError,
    DataError,
    ModelError,
    NetworkError,
    NonFiniteLossError,
    RecipeError,
    UsageError,
    WorkerLostError,
)
from coterie.logs import get_logger

log = get_logger(__name__)

FATAL = (NonFiniteLossError, ModelError, DataError, RecipeError, UsageError)
"""What another device would end with, too."""


def take_losses(inbox: Inbox, error: CoterieError) -> list[Loss]:
    """What was lost when `error` was raised.

    Raises:
        CoterieError: It is no loss that a run can bear.
    """
    losses = _taken(inbox)
    is_loss = isinstance(error, WorkerLostError) or any(loss.error is error for loss in losses)
    if not losses or not is_loss:
        raise error
    return losses


def may_return(loss: Loss) -> bool:
    """Whether a worker was cut off or killed, and somebody is there who may start it again."""
    return isinstance(loss.error, NetworkError | WorkerLostError) and not loss.member.is_owner


def lost_meanwhile(inbox: Inbox) -> list[Loss]:
    """What was lost while a plan was made, and is not to have a part in it.

    A stage that only ended with its links to whoever was lost before has one: its worker still has all that it held.

    Raises:
        CoterieError: There is one among them that no run can bear.
    """
    losses = _taken(inbox)
    cut_off = [loss for loss in losses if loss.stays and isinstance(loss.error, NetworkError | WorkerLostError)]
    for loss in cut_off:
        log.info("%s gave its stage up before the next plan came: %s", loss.member.worker, loss.reason)
    return [loss for loss in losses if loss not in cut_off]


def _taken(inbox: Inbox) -> list[Loss]:
    losses = inbox.take_losses()
    fatal = next((loss.error for loss in losses if isinstance(loss.error, FATAL)), None)
    if fatal is not None:
        raise fatal
    return losses
