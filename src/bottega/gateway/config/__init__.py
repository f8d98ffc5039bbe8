"""What `bottega serve --config` reads."""
