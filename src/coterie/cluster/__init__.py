"""The messages between coordinator and workers, and the pure functions that say what they lead to."""
