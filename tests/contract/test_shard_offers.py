"""Both ends of an offer: what the coordinator offers of a unit, what a worker takes from its disk, and what travels."""

import asyncio

import pytest
import torch

from coterie.cluster.messages import OPTIMIZER, PARAMETER, WEIGHTS, UnitBody, pack, unpack
from coterie.coordinator import shard_offers
from coterie.coordinator.shard_offers import encoded, offer_of, pieces
from coterie.errors import ProtocolError
from coterie.transport.frame import Frame, FrameHeader
from coterie.units import MIB
from coterie.worker.shard_cache import ShardCache
from coterie.worker.shard_intake import ShardIntake

UNIT = 3


def a_unit() -> dict[str, torch.Tensor]:
    """Two large frozen tensors, a small one, and what is trained."""
    return {
        PARAMETER + "w": torch.randn(300, 512),
        PARAMETER + "q/packed": torch.randint(0, 255, (700, 1024), dtype=torch.uint8),
        PARAMETER + "bias": torch.randn(8),
        PARAMETER + "adapter": torch.randn(300, 512),
        OPTIMIZER + "adapter/exp_avg": torch.randn(300, 512),
    }


def frame_of(parts) -> Frame:
    header = FrameHeader(kind=WEIGHTS, body=pack(UnitBody(unit=UNIT)), tensors=tuple(spec for spec, _ in parts))
    return Frame(header, tuple(bytearray(buffer) for _, buffer in parts))


def joining(tensors, folder) -> tuple[dict[str, torch.Tensor], int]:
    """What a worker has of a unit after the coordinator has sent it, and the bytes of tensors that travelled."""

    async def both_ends():
        intake = ShardIntake(ShardCache(folder, 64 * MIB))
        parts = encoded(tensors)
        offer = offer_of(UNIT, parts, {"adapter"})
        found, wants = await intake.offered(unpack(pack(offer)))
        names = {part.name for part in offer.parts} - set(wants.names)
        sent = 0
        for piece in pieces([part for part in parts if part[0].name not in names]):
            frame = frame_of(piece)
            await intake.received(frame)
            sent += frame.payload_bytes
            found |= {
                spec.name: torch.frombuffer(buffer, dtype=tensors[spec.name].dtype).reshape(spec.shape)
                for spec, buffer in zip(frame.header.tensors, frame.buffers, strict=True)
            }
        return found, sent

    return asyncio.run(both_ends())


def test_what_came_once_does_not_travel_again_and_is_the_same_to_the_bit(tmp_path):
    tensors = a_unit()
    frozen = sum(tensors[PARAMETER + name].nbytes for name in ("w", "q/packed"))
    everything = sum(tensor.nbytes for tensor in tensors.values())
    for travels in (everything, everything - frozen):
        found, sent = joining(tensors, tmp_path)
        assert sent == travels
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor)


def test_what_is_trained_is_never_on_a_workers_disk(tmp_path):
    tensors = a_unit()
    joining(tensors, tmp_path)
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(kept) == sorted(tensors[PARAMETER + name].numpy().tobytes() for name in ("w", "q/packed"))


def test_after_a_broken_link_only_the_pieces_that_had_not_come_travel(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_offers, "PIECE_BYTES", 1)
    tensors = a_unit()

    async def broken():
        intake = ShardIntake(ShardCache(tmp_path, 64 * MIB))
        parts = encoded(tensors)
        await intake.offered(offer_of(UNIT, parts, {"adapter"}))
        await intake.received(frame_of(next(iter(pieces(parts)))))

    asyncio.run(broken())
    _, sent = joining(tensors, tmp_path)
    assert sent == sum(tensor.nbytes for tensor in tensors.values()) - tensors[PARAMETER + "w"].nbytes


@pytest.mark.parametrize("change", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: bytes(len(data))])
def test_bytes_that_are_not_those_that_were_offered_are_refused_and_not_kept(tmp_path, change):
    async def test():
        intake = ShardIntake(ShardCache(tmp_path, 64 * MIB))
        parts = encoded(a_unit())
        await intake.offered(offer_of(UNIT, parts, {"adapter"}))
        spec, buffer = parts[0]
        with pytest.raises(ProtocolError, match="not those that were offered"):
            await intake.received(frame_of([(spec, change(bytes(buffer)))]))

    asyncio.run(test())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_without_a_cache_everything_is_wanted_and_still_checked():
    async def test():
        intake = ShardIntake(None)
        parts = encoded(a_unit())
        offer = offer_of(UNIT, parts, {"adapter"})
        found, wants = await intake.offered(offer)
        assert found == {}
        assert wants.names == tuple(part.name for part in offer.parts)
        await intake.received(frame_of(parts))

    asyncio.run(test())


def test_a_unit_with_little_that_is_frozen_is_not_offered():
    assert offer_of(UNIT, encoded({PARAMETER + "w": torch.zeros(1000, 100)}), ()) is None
    assert offer_of(UNIT, encoded({PARAMETER + "w": torch.zeros(1000, 1000)}), {"w"}) is None
    assert offer_of(UNIT, encoded({PARAMETER + f"w{index}": torch.zeros(1000) for index in range(2000)}), ()) is None


def test_pieces_are_as_large_as_they_may_be_and_keep_every_tensor(monkeypatch):
    monkeypatch.setattr(shard_offers, "PIECE_BYTES", 100)
    parts = encoded(
        {f"t{index}": torch.zeros(size, dtype=torch.uint8) for index, size in enumerate((40, 60, 1, 500, 3))}
    )
    assert [[spec.nbytes for spec, _ in piece] for piece in pieces(parts)] == [[40, 60], [1], [500], [3]]
    assert list(pieces([])) == [[]]
