"""Exact repeats, answered from memory."""
