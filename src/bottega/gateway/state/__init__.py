"""State shared by several gateways: limits, exact repeats and benefit gates (decision 19)."""
