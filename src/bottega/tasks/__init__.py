"""Drawn tasks: seeded pictures, questions and answers that need no download (needs torch)."""
