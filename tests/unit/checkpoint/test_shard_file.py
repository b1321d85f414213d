"""One unit's file: what is written, what a peer may send, what is refused."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save, save_file

from coterie.checkpoint.shard_file import hash_file, join_state, pieces, split_key, split_state, write_pieces
from coterie.checkpoint.store import CheckpointStore
from coterie.errors import CheckpointError, ProtocolError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32]


@given(
    st.dictionaries(
        st.text("abc.é/", min_size=1, max_size=6),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_the_pieces_are_a_file_that_safetensors_itself_reads_with_every_tensor_aligned(layout):
    tensors = {key: torch.arange(8 * 8 * 8)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
               for key, (dtype, shape) in layout.items()}  # fmt: skip
    data = b"".join(pieces(tensors))
    read = load(data)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[key], tensors[key]) and read[key].dtype == tensors[key].dtype for key in tensors)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for key, tensor in tensors.items():
        assert (8 + length + header[key]["data_offsets"][0]) % tensor.element_size() == 0


def test_views_transposed_and_shared_tensors_are_written_as_what_they_show(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "t": base.T,
        "row": base[1],
        "expanded": torch.ones(1).expand(3),
        "same": base,
        "grad": base.clone().requires_grad_(),
    }
    write_pieces(tmp_path / "x", pieces(tensors), 10_000)
    read = load((tmp_path / "x").read_bytes())
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())


def test_the_hash_and_the_size_are_those_of_the_file(tmp_path):
    digest, nbytes = write_pieces(tmp_path / "x", [b"ab", bytearray(b"cd"), memoryview(b"ef")], 6)
    assert digest == hash_file(tmp_path / "x")
    assert nbytes == 6
    assert (tmp_path / "x").read_bytes() == b"abcdef"


def test_state_is_joined_and_split_without_loss(tiny):
    parameters, optimizer_state = tiny.state(3, 1)
    again, state = split_state(join_state(parameters, optimizer_state))
    assert again == parameters
    assert state == optimizer_state


@pytest.mark.parametrize(
    "key", ["", "param", "param/", "optim/x", "optim//step", "optim/x/", "optim/x/Step", "weights/x", "x"]
)
def test_a_key_that_is_neither_parameter_nor_state_is_refused(key):
    with pytest.raises(ProtocolError, match="neither a parameter"):
        split_key(key)


@pytest.fixture
def writer(tmp_path):
    shapes = {1: {"w": (2, 3), "b": (3,)}}
    with CheckpointStore(tmp_path).begin(7, shapes) as opened:
        yield opened


GOOD = {"param/w": torch.ones(2, 3), "param/b": torch.ones(3), "optim/w/exp_avg": torch.ones(2, 3)}
HOSTILE = {
    "missing": {"param/w": torch.ones(2, 3)},
    "unknown": {**GOOD, "param/other": torch.ones(1)},
    "state of an unknown": {**GOOD, "optim/other/step": torch.ones(1)},
    "wrong shape": {**GOOD, "param/w": torch.ones(3, 2)},
    "scalar": {**GOOD, "param/w": torch.tensor(1.0)},
    "integers": {**GOOD, "param/w": torch.ones(2, 3, dtype=torch.int64)},
    "bytes": {**GOOD, "optim/w/exp_avg": torch.ones(2, 3, dtype=torch.uint8)},
    "state of another shape": {**GOOD, "optim/w/exp_avg": torch.ones(6)},
    "five fields": {**GOOD, **{f"optim/b/f{i}": torch.ones(3) for i in range(5)}},
    "strange key": {**GOOD, "../../etc/passwd": torch.ones(1)},
}


@pytest.mark.parametrize("tensors", HOSTILE.values(), ids=HOSTILE)
def test_tensors_that_are_not_the_units_are_refused_however_they_come(writer, tensors, tmp_path):
    with pytest.raises(ProtocolError):
        writer.write_unit_bytes(1, save(tensors))
    assert writer.missing_units == (1,)
    assert list((tmp_path / "step-000007.partial").iterdir()) == []
    if "strange key" not in HOSTILE or tensors is not HOSTILE["strange key"]:
        with pytest.raises(ProtocolError):
            writer.write_unit(1, *split_state(tensors))


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xff" * 64,
        b"\x80\x04\x95pickle" * 20,
        save(GOOD)[:-1],
        save(GOOD) + b"\0",
        (2**40).to_bytes(8, "little") + b"{}",
        (64).to_bytes(8, "little") + b'{"param/w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,99]}}  ' + b"\0" * 24,
    ],
)
def test_bytes_that_are_no_safetensors_file_are_refused(writer, blob):
    with pytest.raises(ProtocolError):
        writer.write_unit_bytes(1, blob)


def test_a_stream_that_does_not_end_is_cut_off_at_the_size_that_the_unit_can_need(writer):
    sent = 0

    def endless():
        nonlocal sent
        while True:
            sent += 1
            yield bytes(1024**2)

    with pytest.raises(ProtocolError, match="larger than"):
        writer.write_unit_bytes(1, endless())
    assert sent < 20


def test_a_bad_second_copy_does_not_destroy_the_good_first_one(writer, tiny):
    writer.write_unit_bytes(1, save(GOOD))
    with pytest.raises(ProtocolError):
        writer.write_unit_bytes(1, save(HOSTILE["wrong shape"]))
    assert torch.equal(writer.commit(tiny.manifest(7)).read_unit(1)[0]["w"], GOOD["param/w"])


def test_a_unit_that_the_checkpoint_does_not_have_is_refused(writer):
    with pytest.raises(ProtocolError, match="unit 2 is not among"):
        writer.write_unit(2, {}, {})


def test_a_lost_connection_in_mid_stream_is_not_called_a_storage_error(writer, tiny):
    def breaks():
        yield save(GOOD)[:40]
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        writer.write_unit_bytes(1, breaks())
    writer.write_unit_bytes(1, save(GOOD))
    assert writer.commit(tiny.manifest(7)).units == (1,)


def test_bytes_in_pieces_and_tensors_make_the_same_file(tmp_path, tiny):
    store = CheckpointStore(tmp_path)
    data = b"".join(pieces(join_state(*tiny.state(1, 3))))
    with store.begin(1, {3: tiny.shapes[3]}) as writer:
        writer.write_unit(3, *tiny.state(1, 3))
        first = writer.commit(tiny.manifest(1)).manifest.shards
    with store.begin(2, {3: tiny.shapes[3]}) as writer:
        writer.write_unit_bytes(3, (data[i : i + 7] for i in range(0, len(data), 7)))
        second = writer.commit(tiny.manifest(2)).manifest.shards
    assert first == second


def test_reading_takes_only_the_tensors_that_are_asked_for_and_copies_them(tmp_path, tiny):
    checkpoint = tiny.save(CheckpointStore(tmp_path), 4)
    parameters, state = checkpoint.read(["head.weight", "embed.weight"])
    assert set(parameters) == set(state) == {"head.weight", "embed.weight"}
    assert torch.equal(parameters["head.weight"], tiny.state(4, 3)[0]["head.weight"])
    for path in checkpoint.folder.iterdir():
        path.unlink()
    parameters["head.weight"].add_(1)
    state["embed.weight"]["exp_avg"].add_(1)


def test_reading_what_is_not_there_says_so(tmp_path, tiny):
    checkpoint = tiny.save(CheckpointStore(tmp_path), 4)
    with pytest.raises(CheckpointError, match="no nonsense"):
        checkpoint.read(["head.weight", "nonsense"])
    with pytest.raises(CheckpointError, match="no nonsense"):
        checkpoint.parameters(["head.weight", "nonsense"])
    with pytest.raises(CheckpointError, match="no unit 9"):
        checkpoint.read_unit(9)


def test_shards_are_plain_safetensors_files_that_anyone_can_open(tmp_path, tiny):
    checkpoint = tiny.save(CheckpointStore(tmp_path), 4)
    keys = set(load(checkpoint.unit_path(1).read_bytes()))
    assert {"param/block.0.weight", "optim/block.0.weight/exp_avg", "optim/block.0.bias/step"} <= keys
    assert json.loads((checkpoint.folder / "manifest.json").read_text())["manifest"]["global_step"] == 4
    save_file({"param/x": torch.ones(1)}, tmp_path / "y.safetensors")
