"""Shared mechanisms without domain knowledge. Each has one implementation."""
