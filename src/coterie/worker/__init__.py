"""The program on every device: join, profile, build a stage, run it."""
