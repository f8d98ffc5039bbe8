"""Models and MaxSim on a GPU: python -m benchmarks.gpu [--device cuda] [--quick] [--json F]

Times are medians of repeats, each after a synchronization. A *floor* is the least time that a card
needs: the bytes that the work must read divided by its measured memory bandwidth, or the operations
divided by its measured rate of matrix products, whichever is longer. Weights are random, except
those of the bundled model. `--quick --device cpu` checks the script on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.late_pipeline import saved as save_flmr
from benchmarks.racc import compressor, random_case, random_model
from bottega import Image, Query, TransformersGenerator, bundled, load_digits
from bottega.bundled import bundled_folder
from bottega.compression import (
    HyperModel,
    InputBuilder,
    PassageCompressor,
    PassageStore,
    StoreManifest,
)
from bottega.generation.loaded import LoadedModel
from bottega.knowledge import FlmrEmbedder
from bottega.prompting import InterleavedPrompter
from bottega.types import Candidate, Prompt, Sampling

SEED, SHOTS, RECALL_AT = 0, 10, 20
# About a billion weights, with the shape of a small Llama.
LARGE = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192}
LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}


@dataclass(frozen=True)
class Sizes:
    """Amounts of work, and the number of repeats."""

    repeats: int = 7
    questions: int = 512
    batches: Sequence[int] = (16, 64, 256)
    rows: Sequence[int] = (1, 16, 64)
    new_tokens: int = 64
    documents: int = 100_000
    images: int = 256
    copied: int = 1 << 30
    product: int = 8192


QUICK = Sizes(1, 16, (16,), (1, 2), 4, 500, 8, 1 << 22, 256)


@dataclass(frozen=True)
class Card:
    """A device and its measured rates: bytes per second, read and written, and operations per
    second by dtype."""

    device: torch.device
    bandwidth: float
    rates: dict[torch.dtype, float]

    def floor(
        self, read: float, operations: float = 0, dtype: torch.dtype = torch.bfloat16
    ) -> float:
        """Return the least seconds for the work."""
        return max(read / self.bandwidth, operations / self.rates[dtype])


@dataclass
class Bench:
    """A card, the amounts of work, and a folder for models."""

    card: Card
    sizes: Sizes
    folder: Path

    @cached_property
    def large(self) -> LoadedModel:
        shape = LARGE if self.card.device.type == "cuda" else None
        return random_model(self.folder / "large", shape, str(self.card.device), "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="device of torch")
    parser.add_argument("--quick", action="store_true", help="use small sizes, to check the script")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device is available; --quick --device cpu checks the script")
    sizes = QUICK if options.quick else Sizes()
    card = measure_card(torch.device(options.device), sizes)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(card, sizes, Path(name))
        for part in (bundled_replies, decoding, racc_prefix, maxsim, embedding):
            print(f"# {part.__name__}", flush=True)
            for line in part(bench):
                results.append({"part": part.__name__, **line})
                print("  ".join(f"{key} {shown(value)}" for key, value in line.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of the work, after one run to warm up."""

    def once() -> float:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(repeats))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_card(device: torch.device, sizes: Sizes) -> Card:
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = seconds(lambda: target.copy_(source), device, sizes.repeats)
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        one, other = (
            torch.randn(sizes.product, sizes.product, device=device).to(dtype) for _ in range(2)
        )
        taken = seconds(partial(torch.matmul, one, other), device, sizes.repeats)
        rates[dtype] = 2 * sizes.product**3 / taken
    card = Card(device, 2 * sizes.copied / copied, rates)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    tera = {dtype: rate / 1e12 for dtype, rate in rates.items()}
    print(f"{name}, torch {torch.__version__}: {card.bandwidth / 1e12:.3g} TB/s read and written, ")
    print(f"{tera[torch.bfloat16]:.3g} Tflop/s in bfloat16, {tera[torch.float32]:.3g} in float32")
    return card


def bundled_replies(bench: Bench) -> Iterator[dict[str, Any]]:
    """Replies of the bundled model to digits with ten demonstrations. Images are encoded in the
    first round, which is not timed."""
    card, sizes = bench.card, bench.sizes
    prompts = digit_prompts(sizes.questions)
    expected, taken = timed_replies(bundled(), prompts, 1)
    yield {"device": "cpu, one thread", "batch": 16, "replies a second": len(prompts) / taken}
    for batch in sizes.batches:
        found, taken = timed_replies(
            generator(str(card.device), batch), prompts, max(1, sizes.repeats // 2)
        )
        same = sum(one == other for one, other in zip(found, expected, strict=True))
        yield {
            "device": card.device.type,
            "batch": batch,
            "replies a second": len(prompts) / taken,
            "equal to the CPU's": f"{same} of {len(prompts)}",
        }


def digit_prompts(count: int) -> list[Prompt]:
    examples = list(load_digits())
    queries, others = examples[:count], examples[count:]
    draw = np.random.default_rng(SEED)
    return [
        InterleavedPrompter(repeat_question=False)(
            example.query,
            [Candidate(others[n], 1.0) for n in draw.choice(len(others), SHOTS, replace=False)],
        )
        for example in queries
    ]


def generator(device: str, batch: int) -> TransformersGenerator:
    return TransformersGenerator(
        bundled_folder("apprentice"),
        device=device,
        dtype="float32",
        max_batch=batch,
        turns_only=True,
        prefix_cache_mb=0,
    )


def timed_replies(
    made: TransformersGenerator, prompts: Sequence[Prompt], repeats: int
) -> tuple[list[str], float]:
    """Return the texts, and the median time of a round. A round before warms up."""

    async def replies() -> list[str]:
        sampling = Sampling(max_tokens=8)
        found = await asyncio.gather(*(made.generate(one, sampling) for one in prompts))
        return [reply.completions[0].text for reply in found]

    async def rounds() -> tuple[list[str], float]:
        texts, measured = await replies(), []
        for _ in range(repeats):
            start = time.perf_counter()
            texts = await replies()
            measured.append(time.perf_counter() - start)
        await made.aclose()
        return texts, statistics.median(measured)

    return asyncio.run(rounds())


def decoding(bench: Bench) -> Iterator[dict[str, Any]]:
    """One token for each row: the decoder's weights are read once for any number of rows."""
    card, sizes = bench.card, bench.sizes
    loaded = bench.large
    decoder = loaded.model.model.language_model
    weights = sum(one.numel() * one.element_size() for one in decoder.parameters())
    weights += loaded.model.lm_head.weight.numel() * loaded.model.lm_head.weight.element_size()
    for rows in sizes.rows:
        ids = torch.randint(5, 900, (rows, 64), device=card.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def generate(count: int, inputs: dict[str, Any] = inputs) -> object:
            return loaded.model.generate(
                **inputs,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )

        with torch.inference_mode():
            several = seconds(lambda: generate(sizes.new_tokens), card.device, sizes.repeats)
            single = seconds(lambda: generate(1), card.device, sizes.repeats)
        step = (several - single) / (sizes.new_tokens - 1)
        floor = card.floor(weights)
        yield {
            "rows": rows,
            "tokens a second": rows / step,
            "ms a step": step * 1000,
            "floor, ms": floor * 1000,
            "share of the bandwidth": floor / step,
        }


def racc_prefix(bench: Bench) -> Iterator[dict[str, Any]]:
    """Ten tokens after five passages of 200 tokens: as text, compressed, and stored."""
    card, sizes = bench.card, bench.sizes
    loaded = bench.large
    texts = InputBuilder(loaded.encode, loaded.ends)
    case = random_case(loaded.model, texts)
    hyper = HyperModel(loaded.model)
    racc = compressor(hyper, loaded)
    once = PassageCompressor(racc, hyper, texts)
    manifest = StoreManifest("random", racc.config.document_prompts, racc.config.width, "fp16")
    store = PassageStore(bench.folder / "prompts", manifest)
    store.add(case.named, once.compress)
    stored = PassageCompressor(racc, hyper, texts, store)
    methods: dict[str, Callable[[], object]] = {
        "concatenation": case.concatenated,
        "RACC online": lambda: case.condensed(PassageCompressor(racc, hyper, texts)),
        "RACC pre-saved": lambda: case.condensed(PassageCompressor(racc, hyper, texts, store)),
        "RACC pre-saved, cached image": lambda: case.condensed(stored),
        "no passages": case.alone,
    }
    with torch.inference_mode():
        times = {name: seconds(one, card.device, sizes.repeats) for name, one in methods.items()}
    for name, taken in times.items():
        yield {"method": name, "ms": taken * 1000, "faster": times["concatenation"] / taken}


def maxsim(bench: Bench) -> Iterator[dict[str, Any]]:
    """All documents scored in bfloat16. The recall is that of the exact float32 scores."""
    card, sizes = bench.card, bench.sizes
    tokens, dimension = 150, 128
    draw = torch.Generator(card.device).manual_seed(SEED)

    def unit_rows(*shape: int) -> torch.Tensor:
        rows = torch.randn(*shape, dimension, generator=draw, device=card.device)
        return torch.nn.functional.normalize(rows, dim=-1)

    documents = unit_rows(sizes.documents, tokens)
    half = documents.to(torch.bfloat16)
    for length in (40, 300):
        chosen = documents[length][torch.arange(length) % tokens]
        query = torch.nn.functional.normalize(chosen + 0.7 * unit_rows(length), dim=-1)
        on_card = query.to(torch.bfloat16)
        block = max(1, (1 << 28) // (length * tokens))
        taken = seconds(partial(scores, on_card, half, block), card.device, sizes.repeats)
        exact = set(scores(query, documents, block).topk(RECALL_AT).indices.tolist())
        found = set(scores(on_card, half, block).topk(RECALL_AT).indices.tolist())
        operations = 2.0 * half.numel() * length
        floor = card.floor(half.numel() * half.element_size(), operations)
        yield {
            "query tokens": length,
            "documents": sizes.documents,
            "ms": taken * 1000,
            "floor, ms": floor * 1000,
            "of the floor": taken / floor,
            f"recall@{RECALL_AT}": len(exact & found) / RECALL_AT,
        }


def scores(query: torch.Tensor, documents: torch.Tensor, block: int) -> torch.Tensor:
    """Return (documents,) MaxSim scores, in blocks that bound the memory of the products."""
    found = [(part @ query.T).amax(1).float().sum(-1) for part in torch.split(documents, block)]
    return torch.cat(found)


def embedding(bench: Bench) -> Iterator[dict[str, Any]]:
    """Images and questions by PreFLMR (real widths, a quarter of its layers, float32)."""
    card, sizes = bench.card, bench.sizes
    (bench.folder / "flmr").mkdir()
    embedder = FlmrEmbedder(
        save_flmr(bench.folder / "flmr"), batch_size=64, device=str(card.device)
    )
    draw = np.random.default_rng(SEED)
    queries = [
        Query("what is this", (Image.from_pillow(Pillow.fromarray(pixels)),))
        for pixels in draw.integers(0, 255, (sizes.images, 224, 224, 3), dtype=np.uint8)
    ]
    taken = seconds(lambda: embedder.embed_queries(queries), card.device, min(3, sizes.repeats))
    model = embedder._model
    parameters = list(model.parameters())
    rows = min(64, sizes.images)
    pixels = torch.randn(rows, 3, 224, 224, device=card.device)
    ids = torch.ones(rows, 32, dtype=torch.int64, device=card.device)

    def forward() -> None:
        _, states = model.query_words(ids, ids)
        model.query_images(pixels, states)

    with torch.inference_mode():
        alone = seconds(forward, card.device, sizes.repeats)
        operations = count_operations(forward)
    read = sum(one.numel() * one.element_size() for one in parameters)
    floor = card.floor(read, operations, torch.float32)
    yield {
        "images a second": sizes.images / taken,
        "by the model alone": rows / alone,
        "by its floor": rows / floor,
        "share of the floor": floor / alone,
    }


def count_operations(work: Callable[[], object]) -> int:
    """Return the floating-point operations of the work, with plain attention: torch's counter does
    not know every fused kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        work()
    return int(counter.get_total_flops())


if __name__ == "__main__":
    main()
