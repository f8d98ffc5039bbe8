"""Synthetic data and the recipe that trains the bundled models (`python -m training`)."""
