"""Tensors as bytes: exact and zero-copy, or smaller and lossy where the user allows it."""

from coterie.tensors.codecs import Codec, decode, encode

__all__ = ["Codec", "decode", "encode"]
