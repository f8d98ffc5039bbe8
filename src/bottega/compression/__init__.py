"""Retrieved knowledge as a few keys and values in front of a frozen model (RACC, Weng et al.).
Needs the extra `local`: torch and transformers."""

from bottega.compression.baselines import OneToken, Reuse
from bottega.compression.condenser import Compressed, Condenser
from bottega.compression.hyper import Hyper, pipe
from bottega.compression.racc import Racc, Shape
from bottega.compression.saved import Saved, load, save
from bottega.compression.store import Manifest, PassageStore
from bottega.compression.texts import Texts

__all__ = [
    "Compressed",
    "Condenser",
    "Hyper",
    "Manifest",
    "OneToken",
    "PassageStore",
    "Racc",
    "Reuse",
    "Saved",
    "Shape",
    "Texts",
    "load",
    "pipe",
    "save",
]
