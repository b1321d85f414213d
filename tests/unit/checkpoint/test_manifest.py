"""The manifest: every field survives, nothing unknown is let in."""

import hashlib
import json
import math

import msgspec
import pytest
import torch

from coterie.checkpoint.manifest import ShardEntry, decode_manifest, encode_manifest
from coterie.errors import CheckpointError


def sealed(manifest: dict) -> bytes:
    body = json.dumps(manifest).encode()
    return b'{"sha256": "%s", "manifest": %s}' % (hashlib.sha256(body).hexdigest().encode(), body)


def plain(manifest) -> dict:
    return json.loads(encode_manifest(manifest))["manifest"]


def test_every_field_survives_the_file(tiny):
    shard = ShardEntry(unit=3, file="unit-003.safetensors", sha256="ab", nbytes=12, parameters=("a", "é"))
    manifest = msgspec.structs.replace(tiny.manifest(9), shards=(shard,), base_model="bert", epoch=2)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifest.nbytes == 12
    assert manifest.unit_of == {"a": 3, "é": 3}


def test_the_manifest_is_json_that_people_can_read(tiny):
    assert '\n  "global_step": 9' in encode_manifest(tiny.manifest(9)).decode()


def test_versions_are_kept_as_plain_text(tiny):
    assert decode_manifest(encode_manifest(tiny.manifest(9))).libraries == {"torch": str(torch.__version__)}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_json_cannot_hold_is_refused_when_written_and_not_when_read(tiny, loss):
    with pytest.raises(CheckpointError):
        encode_manifest(msgspec.structs.replace(tiny.manifest(9), loss_tail=(1.0, loss)))


@pytest.mark.parametrize(
    "change",
    [
        {"surprise": 1},
        {"global_step": "9"},
        {"global_step": None},
        {"shards": [{"unit": 0, "file": "unit-000.safetensors"}]},
        {"shards": [{"unit": 0, "file": "../unit-000.safetensors", "sha256": "", "nbytes": 0, "parameters": []}]},
        {"terms": {}},
    ],
)
def test_unknown_missing_and_mistyped_fields_are_refused(tiny, change):
    with pytest.raises(CheckpointError):
        decode_manifest(sealed({**plain(tiny.manifest(9)), **change}))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff\xfe", b'{"sha256": "", "manifest": 3}', sealed({"a": 1})])
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(CheckpointError):
        decode_manifest(data)
