"""Loaders of examples from files.

Each loader is a generator. Unreadable examples go to `on_error`; without it, the loader raises.
"""
