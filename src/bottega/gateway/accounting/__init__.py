"""Who asks, what it may cost, what it did."""
