"""Accounts, their limits, and the ledger of requests."""
