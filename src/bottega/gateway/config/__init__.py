"""Configuration of `bottega serve`."""
