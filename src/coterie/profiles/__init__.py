"""Measured facts about a model, its devices and their links, as data. Who measures them is `measure`."""
