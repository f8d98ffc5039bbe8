"""Synthetic tasks: seeded images, questions and answers that need no download (needs torch)."""
