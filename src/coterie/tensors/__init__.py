"""Torch tensors as bytes on a link, and the codecs that make them smaller."""
