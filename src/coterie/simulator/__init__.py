"""The same plan and schedule on virtual devices: what it predicts is what would run."""
