"""Cache-of-Thought behind one OpenAI-compatible endpoint."""
