"""Retrieved knowledge as a few keys and values in front of a frozen model (RACC, Weng et al.).
Needs the extra `local`: torch and transformers."""

from bottega.racc.baselines import OneToken, Reuse
from bottega.racc.condenser import Compressed, Condenser
from bottega.racc.hyper import Hyper, pipe
from bottega.racc.racc import Racc, Shape
from bottega.racc.saved import Saved, load, save
from bottega.racc.store import Manifest, PassageStore
from bottega.racc.texts import Texts

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
