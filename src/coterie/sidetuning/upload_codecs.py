"""How each type of activations travels."""

from coterie.jobs.side_spec import UploadDtype
from coterie.tensors.codecs import Codec

UPLOAD_CODECS: dict[UploadDtype, Codec] = {"float32": "raw", "float16": "fp16", "int8": "int8", "int4": "int4"}
"""The same as `coterie.planner.side_bytes` counts with, which may not import what computes."""
