"""Which model answers."""

from bottega.routing.coin import coin
from bottega.routing.fixed import always, cold_start

__all__ = ["always", "coin", "cold_start"]
