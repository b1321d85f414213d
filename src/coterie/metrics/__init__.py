"""Typed records of a run and the places they go: events file, plot, TensorBoard, progress display."""
