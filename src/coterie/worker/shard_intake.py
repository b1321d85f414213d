"""What a worker does with an offer of frozen tensors: takes from its cache what is there, and keeps what then comes."""

import asyncio

from torch import Tensor

from coterie.cluster.shard_messages import ShardOffer, ShardPart, ShardWants
from coterie.errors import ProtocolError
from coterie.logs import get_logger
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame, TensorSpec
from coterie.units import format_bytes
from coterie.worker.shard_cache import ShardCache, check_part, digest_of, spec_of

log = get_logger(__name__)


class ShardIntake:
    """Lives on the event loop; the disk is read and written in a thread.

    Args:
        cache: Where tensors are kept; None: nothing is.
    """

    def __init__(self, cache: ShardCache | None) -> None:
        self._cache = cache
        self._awaited: dict[str, ShardPart] = {}

    async def offered(self, offer: ShardOffer) -> tuple[dict[str, Tensor], ShardWants]:
        """The tensors that are here already, by name, and the answer to the coordinator.

        Raises:
            ProtocolError: The offer contradicts itself.
        """
        found = await asyncio.to_thread(self._load, offer)
        missing = tuple(part for part in offer.parts if part.name not in found)
        self._awaited |= {part.name: part for part in missing}
        if found:
            here = sum(part.nbytes for part in offer.parts if part.name in found)
            log.info("unit %d: %s are in the shard cache", offer.unit, format_bytes(here))
        return found, ShardWants(unit=offer.unit, names=tuple(part.name for part in missing))

    async def received(self, frame: Frame) -> None:
        """Check tensors that were offered before they are used, and keep them.

        Raises:
            ProtocolError: Another tensor came than was offered.
        """
        pairs = [
            (spec, buffer)
            for spec, buffer in zip(frame.header.tensors, frame.buffers, strict=True)
            if spec.name in self._awaited
        ]
        if pairs:
            await asyncio.to_thread(self._check_and_keep, pairs)

    def forget(self) -> None:
        """Nothing that was offered is awaited any more: another plan has come."""
        self._awaited.clear()

    def _load(self, offer: ShardOffer) -> dict[str, Tensor]:
        found = {}
        for part in offer.parts:
            check_part(part)
            buffer = self._cache.load(part) if self._cache is not None else None
            if buffer is not None:
                found[part.name] = decode(spec_of(part), buffer)
        return found

    def _check_and_keep(self, pairs: "list[tuple[TensorSpec, bytes | bytearray | memoryview]]") -> None:
        for spec, buffer in pairs:
            part = self._awaited.pop(spec.name)
            if spec != spec_of(part) or digest_of(buffer) != part.digest:
                raise ProtocolError(
                    f"tensor {spec.name[:80]!r} came, and its bytes are not those that were offered "
                    f"(digest {part.digest[:12]}…)"
                )
            if self._cache is not None:
                self._cache.store(part.digest, buffer)
