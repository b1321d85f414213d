"""Fine-tune a transformer together, on the devices you already own."""

__version__ = "0.1.0"
