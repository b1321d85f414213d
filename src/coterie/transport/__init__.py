"""Frames over links: a msgpack header and raw tensor bytes, with limits checked before anything is allocated."""
