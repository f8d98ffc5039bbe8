"""Overhead of the late-interaction retriever over its model's forward pass and its scan."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pillow
from safetensors.torch import save_file

from bottega.image import Image
from bottega.knowledge import FlmrEmbedder, KnowledgeBase, LateInteractionIndex, TokenEmbedder
from bottega.knowledge.embedders.flmr_model import ORIGINAL, FlmrModel, FlmrShape
from bottega.knowledge.late_interaction.token_array import TokenArray
from bottega.knowledge.late_interaction.token_search import TokenIndex
from bottega.knowledge.records import unit
from bottega.protocols import Vectors
from bottega.retrieval import DenseRetriever
from bottega.types import Example, Query

EXAMPLES, TOKENS, REPEATS = 1_000, 40, 5
# PreFLMR ViT-L with its published widths and 6 of 24 and 3 of 12 layers. The forward pass is
# shorter, which increases the relative overhead.
TEXT = {"vocab_size": 64, "num_hidden_layers": 3}
VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", ".", ":")
WORDS = ("using", "the", "provided", "image", "obtain", "documents", "that", "what", "is", "this")


class PrecomputedDocuments:
    """Embedder of questions by PreFLMR with precomputed documents, because the stored side is not
    measured.
    """

    def __init__(self, questions: FlmrEmbedder) -> None:
        self._questions = questions
        self.fingerprint = "prepared"
        self.dimension = questions.dimension
        self.embed_queries = questions.embed_queries

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        return [random_tokens(int(query.text.split()[-1])) for query in queries]


def random_tokens(seed: int) -> Vectors:
    rows = np.random.default_rng(seed).normal(size=(TOKENS, 128))
    return unit(rows.astype(np.float32))


def pipeline_overhead() -> float:
    """Return the ratio of CPU time from question to candidates over forward pass and scan alone."""
    with tempfile.TemporaryDirectory() as name:
        embed = FlmrEmbedder(saved(Path(name)), threads=1)
        with KnowledgeBase.open(":memory:", embed=TokenEmbedder.bundled()) as knowledge:
            knowledge.add(Example(Query(f"what is {n}"), str(n)) for n in range(EXAMPLES))
            with LateInteractionIndex(knowledge, PrecomputedDocuments(embed)) as index:
                index.refresh()
                return against_raw(embed, index, raw_index(knowledge))


def raw_index(knowledge: KnowledgeBase) -> TokenIndex:
    index = TokenIndex(TokenArray(None, "raw", 128))
    index.append(knowledge.ids(), [random_tokens(n) for n in range(EXAMPLES)])
    return index


def against_raw(embed: FlmrEmbedder, index: LateInteractionIndex, raw: TokenIndex) -> float:
    pixels = np.random.default_rng(0).integers(0, 255, (240, 320, 3), dtype=np.uint8)
    encoded = Image.from_pillow(Pillow.fromarray(pixels)).data
    retrieve = DenseRetriever(index.search)
    model = embed._model
    ids, ones = torch.ones(1, 32, dtype=torch.int64), torch.ones(1, 32, dtype=torch.int64)
    values = torch.zeros(1, 3, 224, 224)

    def whole() -> None:
        # A new image each time, because decoded pixels are cached.
        query = Query("what is this", (Image.from_bytes(encoded),))
        asyncio.run(retrieve(query, 20))

    def alone() -> None:
        with torch.inference_mode():
            words, states = model.query_words(ids, ones)
            images = model.query_images(values, states)
        raw.search(torch.cat([words, images], dim=1)[0].numpy(), 20)

    take_rows = {step: [timed(step)] for step in (whole, alone)}
    for _ in range(REPEATS):
        for step, seconds in take_rows.items():
            seconds.append(timed(step))
    return min(take_rows[whole]) / min(take_rows[alone])


def timed(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def saved(folder: Path) -> Path:
    """Save random weights under the original names."""
    torch.manual_seed(0)
    model = FlmrModel(FlmrShape(TEXT, VISION))
    weights = {}
    for name, weight in model.state_dict().items():
        part, _, rest = name.partition(".")
        weights[f"{ORIGINAL[part][0]}.{rest}"] = weight.clone()
    save_file(weights, folder / "model.safetensors")
    config = {"text_config": TEXT, "vision_config": VISION, "mask_instruction_token": ":"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("query_tokenizer", "context_tokenizer"):
        (folder / name).mkdir()
        (folder / name / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]))
    return folder
