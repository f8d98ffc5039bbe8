"""State that several gateways share: limits, exact repeats, and their connections (decision 19)."""
