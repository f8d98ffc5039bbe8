"""Rationales for examples that have none: made by a model, and kept if they lead to the answer."""

from bottega.rationales.enriching import ACCURACY, Enriching, Todo, todo
from bottega.rationales.making import Made, Rationales

__all__ = ["ACCURACY", "Enriching", "Made", "Rationales", "Todo", "todo"]
