"""What holds for every test."""

from hypothesis import settings

# The same examples on every run: main passes or fails by its code alone.
# `--hypothesis-profile=search` looks for new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("search", derandomize=False)
settings.load_profile("same")
