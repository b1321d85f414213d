"""What a device draws, as its owner states it: nothing here is measured, and energy figures made from it say so."""

import msgspec


class PowerModel(msgspec.Struct, frozen=True, kw_only=True):
    """Watts beyond what the device draws when it does nothing; the defaults are a small laptop's, and assumptions.

    Attributes:
        compute_w: While it computes.
        network_w: While it sends or receives.
    """

    compute_w: float = 10.0
    network_w: float = 1.0

    def energy_j(self, *, compute_s: float, network_s: float) -> float:
        """Joules of so many seconds."""
        return self.compute_w * compute_s + self.network_w * network_s
