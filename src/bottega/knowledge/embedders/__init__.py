"""Embedders, which convert queries to vectors."""
