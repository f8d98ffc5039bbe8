"""Keys and values in front of a frozen model of transformers. Needs the extra `local`."""

from bottega.prefixing.injecting import Scores, forward, generate, read
from bottega.prefixing.kv import Geometry, KeyValues

__all__ = ["Geometry", "KeyValues", "Scores", "forward", "generate", "read"]
