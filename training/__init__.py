"""Procedural data and the recipe that trains the bundled model (`python -m training`)."""
