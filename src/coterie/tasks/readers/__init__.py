"""Data files in: one module per format, all giving the same raw sentences."""
