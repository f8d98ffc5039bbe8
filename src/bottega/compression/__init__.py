"""Retrieved knowledge compressed into a short KV prefix of a frozen model (RACC, Weng et al.).

Requires the extra `local`: torch and transformers."""

from bottega.compression.hyper_model import HyperModel, InputBuilder, sentence_prompts
from bottega.compression.model import CompressorConfig, RaccModel
from bottega.compression.passage_store import PassageStore, StoreManifest
from bottega.compression.persistence import SavedCompressor, load, save
from bottega.compression.prefixes import (
    KVReuse,
    OneTokenCompressor,
    PassageCompressor,
    PrefixSearcher,
)

__all__ = [
    "CompressorConfig",
    "HyperModel",
    "InputBuilder",
    "KVReuse",
    "OneTokenCompressor",
    "PassageCompressor",
    "PassageStore",
    "PrefixSearcher",
    "RaccModel",
    "SavedCompressor",
    "StoreManifest",
    "load",
    "save",
    "sentence_prompts",
]
