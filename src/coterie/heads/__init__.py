"""One layer's attention heads and feed-forward neurons, shared over a device's compute backends (METHODS 1.3)."""
