"""Whoever answers: endpoints and models in this process."""
