"""Savings from compressed passages: python benchmarks/racc.py [--quick] [--json F]

A decoder of 70 million random weights (Llama's layers after the bundled model's vision tower)
answers one question about an image with ten tokens, after five passages of 200 tokens each, in
float32 on one thread. Methods alternate, and ratios are taken within each round. The compressor is
random, too: its work does not depend on its training. The image features are precomputed for every
method. Exits with 1 if a requirement is missed.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before torch is imported
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image as Pillow
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.racc_methods import Case, candidates
from bottega import Image
from bottega.bundled import bundled_folder
from bottega.compression import (
    CompressorConfig,
    HyperModel,
    InputBuilder,
    KVReuse,
    OneTokenCompressor,
    PassageCompressor,
    PassageStore,
    RaccModel,
    StoreManifest,
    sentence_prompts,
)
from bottega.compression.hyper_model import rows
from bottega.compression.passage_store import Precision
from bottega.generation.loaded import LoadedModel
from bottega.kv_prefix import Geometry
from bottega.prompting import InterleavedPrompter
from bottega.types import Candidate, Example, Query

SEED, PASSAGES, LENGTH, TOKENS = 0, 5, 200, 10
DECODER = {"num_hidden_layers": 10, "hidden_size": 640, "intermediate_size": 1728}
HEADS = {"num_attention_heads": 10, "num_key_value_heads": 10, "head_dim": 64}
VOCABULARY = 32_000  # Llama's; the bundled model's tokenizer uses the first thousand
WORDS = ("the", "home", "of", "a", "red", "tower", "is", "place", "river", "flower", "water")
QUESTION = "What colour is the bird that builds the house in the picture?"
HARD = "Summarize the key information of the given passage in a concise manner."  # the paper's
CONCAT, CANDIDATES = "concatenation", "five candidates"
ONLINE, STORED, CACHED = "RACC online", "RACC pre-saved", "RACC pre-saved, cached image"
# Required speed-up of the second method over the first; STORED is given a new image.
BARS = {(CONCAT, STORED): 4.3, (CONCAT, CACHED): 5.0, (CANDIDATES, CACHED): 4.0}

hf: Any = transformers
Method = Callable[[], Tensor]
Seconds = Mapping[str, Sequence[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run 3 rounds instead of 11")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hf.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        bench = build_bench(Path(name))
        measured = time_methods(bench.methods, 3 if options.quick else 11)
        counted = {name: operations(method) for name, method in bench.methods.items()}
    lines = [line(name, measured, counted) for name in bench.methods]
    bars = verdicts(measured.wall)
    show(bench, lines, bars)
    if options.json:
        document = {"decoder": bench.weights, "lines": lines, "bytes": bench.sizes, "bars": bars}
        options.json.write_text(json.dumps(document, indent=1))
    sys.exit(0 if all(bar["met"] for bar in bars) else 1)


@dataclass
class Bench:
    """Models and stores of the benchmark. `sizes` are bytes per passage, `weights` those of the
    decoder.
    """

    methods: dict[str, Method]
    weights: int
    sizes: dict[str, float] = field(default_factory=dict)


def build_bench(folder: Path) -> Bench:
    loaded = random_model(folder / "model")
    texts = InputBuilder(loaded.encode, loaded.ends)
    case = random_case(loaded.model, texts)
    hyper = HyperModel(loaded.model)
    racc = compressor(hyper, loaded)
    once = PassageCompressor(racc, hyper, texts)

    def saved(precision: Precision) -> PassageStore:
        shape = racc.config
        manifest = StoreManifest("random", shape.document_prompts, shape.width, precision)
        store = PassageStore(folder / precision, manifest)
        store.add(case.named, once.compress)
        return store

    stores = {"prompts, fp16": saved("fp16"), "prompts, int8": saved("int8")}
    store = stores["prompts, fp16"]
    vectors = PassageStore(folder / "vectors", StoreManifest("random", 1, hyper.width))
    one_token = OneTokenCompressor(hyper.width)
    vectors.add(
        case.named, lambda queries: one_token.passage_vectors(hyper, texts.passages(queries))
    )
    reuse = KVReuse(loaded.model, loaded.encode, loaded.ends, InterleavedPrompter())
    cached = PassageCompressor(racc, hyper, texts, store)

    def uncached(kept: PassageStore | None) -> Method:
        return lambda: case.condensed(PassageCompressor(racc, hyper, texts, kept))

    methods: dict[str, Method] = {
        CONCAT: case.concatenated,
        CANDIDATES: lambda: candidates(case).tokens,
        "full reuse of keys and values": lambda: case.reused(reuse),
        "one token a passage": lambda: case.one_token(one_token, vectors),
        ONLINE: uncached(None),
        STORED: uncached(store),
        CACHED: lambda: case.condensed(cached),
        "no passages": case.alone,
    }
    texts_of = [one.query.text.encode() for one in case.passages]
    sizes = {"text": sum(map(len, texts_of)) / len(texts_of)}
    sizes |= {name: float(one.bytes_per_passage) for name, one in stores.items()}
    sizes |= {"one vector, fp16": float(vectors.bytes_per_passage)}
    sizes |= {"keys and values, fp16": float(LENGTH * bytes_a_token(racc.config.geometry))}
    decoder = loaded.model.model.language_model.parameters()
    return Bench(methods, sum(one.numel() for one in decoder), sizes)


def random_model(
    folder: Path,
    decoder: Mapping[str, int] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
) -> LoadedModel:
    """Return the bundled apprentice with another decoder, by default the one above, saved to the
    folder in this dtype."""
    bundled = bundled_folder("apprentice")
    config = json.loads((bundled / "config.json").read_text())
    config["text_config"] |= {
        **(decoder or DECODER | HEADS),
        "vocab_size": VOCABULARY,
        "rope_parameters": None,
    }
    torch.manual_seed(SEED)
    with torch.device(device):
        model = hf.FastVlmForConditionalGeneration(hf.FastVlmConfig(**config))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    hf.AutoProcessor.from_pretrained(bundled).save_pretrained(folder)
    return LoadedModel.load(str(folder), device, dtype)


def random_case(model: Any, texts: InputBuilder) -> Case:
    draw = random.Random(SEED)
    passages = [passage(texts, draw) for _ in range(PASSAGES)]
    shown = [
        Candidate(Example(one, "", id=f"p{position}"), draw.uniform(20, 25))
        for position, one in enumerate(passages)
    ]
    image = Image.from_pillow(Pillow.effect_noise((64, 64), 80).convert("RGB"))
    return Case(model, texts, Query(QUESTION, (image,)), shown, TOKENS)


def passage(texts: InputBuilder, draw: random.Random) -> Query:
    """Return a passage of exactly LENGTH tokens, including the markers of its turn."""
    query = Query("the")
    while (length := tokens_of(texts, query)) < LENGTH:
        longer = (Query(f"{query.text} {word}") for word in draw.sample(WORDS, len(WORDS)))
        query = next(one for one in longer if length < tokens_of(texts, one) <= LENGTH)
    return query


def tokens_of(texts: InputBuilder, query: Query) -> int:
    return len(rows(texts.passages([Example(query, "")]))[0])


def compressor(hyper: HyperModel, loaded: LoadedModel) -> RaccModel:
    shape = CompressorConfig(hyper.width, Geometry.of(loaded.model))
    hard = torch.tensor(loaded.processor.tokenizer(HARD, add_special_tokens=False).input_ids)
    counts = shape.document_prompts, shape.query_prompts
    documents, queries = (sentence_prompts(hyper, hard, count) for count in counts)
    return RaccModel(shape, (documents, queries)).eval().requires_grad_(False)


def bytes_a_token(geometry: Geometry) -> int:
    return 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * 2


@dataclass
class Timings:
    """Seconds of each round, and the process's own seconds, which other work on the machine
    lengthens less.
    """

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]


def time_methods(methods: Mapping[str, Method], rounds: int) -> Timings:
    """Time the methods in rounds; each round starts with another method."""
    for name, method in methods.items():  # also warms up
        if method().shape != (1, TOKENS):
            raise ValueError(f"{name} answers with another number of tokens")
    names = list(methods)
    measured = Timings({name: [] for name in names}, {name: [] for name in names})
    for turn in range(rounds):
        for position in range(len(names)):
            name = names[(position + turn) % len(names)]
            began, worked = time.perf_counter(), time.process_time()
            methods[name]()
            measured.wall[name].append(time.perf_counter() - began)
            measured.cpu[name].append(time.process_time() - worked)
    return measured


def operations(method: Method) -> int:
    """Return floating-point operations of an answer, by torch's counter. The counter ignores fused
    CPU attention, so plain matrix products are used.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        method()
    return int(counter.get_total_flops())


def ratios(measured: Seconds, name: str, of: str) -> list[float]:
    """Return the seconds of `name` over those of `of`, round by round."""
    return [one / other for one, other in zip(measured[name], measured[of], strict=True)]


def line(name: str, measured: Timings, counted: Mapping[str, int]) -> dict[str, Any]:
    faster = ratios(measured.wall, CONCAT, name)
    return {
        "name": name,
        "seconds": statistics.median(measured.wall[name]),
        "faster": statistics.median(faster),
        "least": min(faster),
        "most": max(faster),
        "cpu": statistics.median(ratios(measured.cpu, CONCAT, name)),
        "gflop": counted[name] / 1e9,
        "fewer": counted[CONCAT] / counted[name],
    }


def verdicts(measured: Seconds) -> list[dict[str, Any]]:
    """Return the requirements with the median ratio over the rounds."""
    found = []
    for (of, name), bar in BARS.items():
        value = statistics.median(ratios(measured, of, name))
        found.append({"name": f"{of} / {name}", "value": value, "bar": bar, "met": value >= bar})
    return found


def show(bench: Bench, lines: list[dict[str, Any]], bars: list[dict[str, Any]]) -> None:
    print(f"# decoder of {bench.weights / 1e6:.0f} M weights, {PASSAGES} x {LENGTH} tokens")
    print(f"{'':32}{'seconds':>8}{'times faster':>22}{'CPU':>7}{'Gflop':>8}{'fewer':>7}")
    for one in lines:
        faster = f"{one['faster']:.2f} ({one['least']:.2f} to {one['most']:.2f})"
        print(
            f"{one['name']:32}{one['seconds']:8.3f}{faster:>22}{one['cpu']:7.2f}"
            f"{one['gflop']:8.1f}{one['fewer']:7.2f}"
        )
    for name, size in bench.sizes.items():
        print(f"a passage as {name}: {size:,.0f} bytes")
    for bar in bars:
        verdict = "met" if bar["met"] else "MISSED"
        print(f"{bar['name']}: {bar['value']:.2f}, bar >= {bar['bar']:g}: {verdict}")


if __name__ == "__main__":
    main()
