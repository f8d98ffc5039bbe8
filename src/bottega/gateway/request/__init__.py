"""The way of one chat request, from its reading to its ledger entry."""
