"""The recipe file: every option, its default and its sentence."""
