"""What the files in a run's folder are called. Needs no torch."""

EVENTS = "events.jsonl"
PLOT = "training.png"
MODEL = "model"
RECIPE = "recipe.toml"
SUMMARY = "summary.json"
LOCK = "run.lock"
"""Held by the process that works on the run."""
