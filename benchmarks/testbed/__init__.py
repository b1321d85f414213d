"""A test bed: several hosts on one machine, with links, memory, speeds and failures of their own. See `docs/`."""

from testbed.bed import Bed
from testbed.carriers import MBIT, Carrier, RelayCarrier, Shape
from testbed.events import Events, wait_for
from testbed.host import SLOW, Host, HostSettings
from testbed.launching import Nursery
from testbed.namespaces import NamespaceCarrier

__all__ = [
    "MBIT",
    "SLOW",
    "Bed",
    "Carrier",
    "Events",
    "Host",
    "HostSettings",
    "NamespaceCarrier",
    "Nursery",
    "RelayCarrier",
    "Shape",
    "wait_for",
]
