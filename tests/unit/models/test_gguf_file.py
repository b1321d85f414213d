"""Reading GGUF headers: what `gguf` itself reads, and clear errors for whatever is broken."""

import contextlib
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import CoterieError, ModelError, UnsupportedModelError
from coterie.models.gguf_file import read_gguf

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def write(path: Path, *, extra: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_rope_freq_base(5e5)
    writer.add_tags(["a", "ü"])
    writer.add_array("llama.numbers", [1, 2, 3])
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)
    random = np.random.default_rng(1)
    values = {kind: random.standard_normal((3, 64)).astype(np.float32) for kind in KINDS}
    for kind, value in values.items():
        stored = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"blk.0.{kind}.weight", gguf.quants.quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    return path, write(path)


def test_metadata_and_tensors_are_what_gguf_itself_reads(written):
    path, _ = written
    file, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert file.architecture == "llama"
    own = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert own.pop("general.tags") == ["a", "ü"]
    assert file.metadata == own | {"general.tags": 2}
    for tensor in theirs.tensors:
        found = file.tensors[tensor.name]
        assert (found.nbytes, found.offset_bytes) == (tensor.n_bytes, tensor.data_offset)
        assert found.kind == tensor.tensor_type
        unpacked = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert torch.equal(file.read(tensor.name), torch.from_numpy(unpacked.astype(np.float32)))


def test_what_was_written_in_full_precision_comes_back_bit_for_bit(written):
    path, values = written
    assert torch.equal(read_gguf(path).read("blk.0.F32.weight"), torch.from_numpy(values["F32"]))
    assert read_gguf(path).kinds == tuple(sorted(KINDS))


@pytest.mark.parametrize("kept", [0, 3, 20, 100, 400])
def test_a_file_that_is_cut_off_is_named_as_damaged(written, tmp_path, kept):
    path = tmp_path / "cut.gguf"
    path.write_bytes(written[0].read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        read_gguf(path)


def test_a_file_without_its_last_tensor_is_refused_before_anything_is_read(written, tmp_path):
    path = tmp_path / "short.gguf"
    path.write_bytes(written[0].read_bytes()[:-100])
    with pytest.raises(ModelError, match="shorter than its list of tensors"):
        read_gguf(path)


def test_other_files_are_no_gguf_files(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_gguf(tmp_path / "a.gguf")


def test_one_part_of_several_is_refused_with_how_to_join_them(tmp_path):
    write(tmp_path / "a-00001-of-00003.gguf", extra={"split.count": 3})
    with pytest.raises(UnsupportedModelError, match="one of 3 parts") as refusal:
        read_gguf(tmp_path / "a-00001-of-00003.gguf")
    assert "llama-gguf-split" in (refusal.value.hint or "")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_to_the_header_ends_otherwise_than_in_our_errors(written, tmp_path_factory, data):
    content = bytearray(written[0].read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 900))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "a.gguf"
    path.write_bytes(content)
    with contextlib.suppress(CoterieError):
        read_gguf(path)
