"""Images from URLs, without a way into the inner network."""
