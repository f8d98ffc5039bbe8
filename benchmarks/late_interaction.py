"""MaxSim against torch's einsum and fast-plaid: python benchmarks/late_interaction.py [--quick]

Figures are CPU seconds on one thread: the best of several rounds, with methods in turn. Documents
have 150 tokens of 128 dimensions, sampled around shared words with noise of 0.5 or 1.0 of a word's
length; questions are 40 or 300 tokens of one document, with noise. fast-plaid needs its own
environment (`pip install fast-plaid` pins another torch): name its Python with --plaid-python.
Exits with 1 if a requirement is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.late_pipeline import pipeline_overhead
from bottega.knowledge.late_interaction.token_array import TokenArray
from bottega.knowledge.late_interaction.token_search import SearchEffort, TokenIndex
from bottega.protocols import Vectors

TOKENS, DIMENSION, K = 150, 128, 20
LENGTHS = {"short": 40, "long": 300}
NOISES = {"words": 0.5, "loose": 1.0}
WORDS, TOPICS, TOPIC_WORDS = 4000, 100, 200
EINSUM_BLOCKS = (16, 64, 256)
PEER = Path(__file__).parent / "peers" / "fast_plaid_rounds.py"
BARS = {"einsum": 3.3, "recall": 0.99, "fast-plaid": 4.0, "overhead": 1.10}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 documents instead of 17,000")
    parser.add_argument("--documents", type=int)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plaid-python", help="Python of an environment with fast-plaid")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    count = options.documents or (2_000 if options.quick else 17_000)
    lines = []
    for name, noise in NOISES.items():
        data = draw(count, options.questions, noise, seed=0)
        # Only one data set: the index of fast-plaid takes minutes to build.
        peer = Plaid(options.plaid_python, data) if name == "words" else None
        lines += shown(compared(name, data, options.rounds, peer))
    overhead = line("pipeline / raw forward and scan", pipeline_overhead(), BARS["overhead"], False)
    lines += shown([overhead])
    if options.json:
        options.json.write_text(json.dumps({"documents": count, "lines": lines}, indent=1))
    sys.exit(1 if any(entry.get("met") is False for entry in lines) else 0)


def shown(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for entry in lines:
        value, bar, verdict = "skipped", "", entry.get("skipped", "")
        if not verdict:
            value = f"{entry['value']:.3f}"
        if entry.get("bar") is not None:
            bar = f"{'>=' if entry['at_least'] else '<='} {entry['bar']:g}"
            verdict = "met" if entry["met"] else "MISSED"
        print(f"{entry['name']:58} {value:>9} {bar:>8} {verdict}", flush=True)
    return lines


def draw(count: int, questions: int, noise: float, seed: int) -> dict[str, NDArray[np.float32]]:
    """Return `documents` (count, tokens, dimension), and `short` and `long` (questions, tokens,
    dimension).
    """
    rng = np.random.default_rng(seed)
    words, topics = rows(rng, WORDS), rows(rng, TOPICS)
    of_topic = np.stack([rng.choice(WORDS, TOPIC_WORDS, replace=False) for _ in range(TOPICS)])
    documents = np.empty((count, TOKENS, DIMENSION), np.float32)
    for document in documents:
        topic = rng.integers(TOPICS)
        common = np.minimum(rng.zipf(1.3, TOKENS), WORDS) - 1
        chosen = np.where(rng.random(TOKENS) < 0.5, rng.choice(of_topic[topic], TOKENS), common)
        context = 0.4 * topics[topic] + 0.3 * rows(rng, 1)
        document[:] = scaled(words[chosen] + context + noise * rows(rng, TOKENS))
    by_length = {
        name: np.stack([question(rng, documents, length) for _ in range(questions)])
        for name, length in LENGTHS.items()
    }
    return {"documents": documents, **by_length}


def question(rng: np.random.Generator, documents: Vectors, length: int) -> Vectors:
    document = documents[rng.integers(len(documents))]
    chosen = rng.choice(len(document), length, replace=length > len(document))
    return scaled(document[chosen] + 0.7 * rows(rng, length))


def rows(rng: np.random.Generator, count: int) -> Vectors:
    return scaled(rng.normal(size=(count, DIMENSION)).astype(np.float32))


def scaled(array: Any) -> Vectors:
    found: Vectors = (array / np.linalg.norm(array, axis=-1, keepdims=True)).astype(np.float32)
    return found


def einsum_scores(documents: torch.Tensor, block: int, query: Vectors) -> Vectors:
    tokens = torch.from_numpy(query)
    found = [
        torch.einsum("qd,btd->bqt", tokens, documents[start : start + block]).amax(-1).sum(-1)
        for start in range(0, len(documents), block)
    ]
    scores: Vectors = torch.cat(found).numpy()
    return scores


def compared(
    name: str, data: dict[str, NDArray[np.float32]], rounds: int, peer: Plaid | None
) -> list[dict[str, Any]]:
    documents = data["documents"]
    index = TokenIndex(TokenArray(None, name, DIMENSION))
    everything = TokenIndex(TokenArray(None, name, DIMENSION), effort=SearchEffort(shortlist=1))
    # Chosen on data of another seed.
    brisk = TokenIndex(TokenArray(None, name, DIMENSION), effort=SearchEffort(0.05, 40, 100))
    start = time.process_time()
    for one in (index, everything, brisk):
        one.append([str(n) for n in range(len(documents))], list(documents))
        one.search(documents[0][:8], 1)  # learns its centroids
    print(f"# {name}: {len(documents)} documents stored three times in {cpu(start):.0f} CPU s")
    tensor = torch.from_numpy(documents)
    found: list[dict[str, Any]] = []
    for length, tokens in LENGTHS.items():
        methods: dict[str, Callable[[Vectors], Any]] = {
            **{f"einsum {b}": partial(einsum_scores, tensor, b) for b in EINSUM_BLOCKS},
            "bottega": lambda q: [int(id) for id, _ in index.search(q, K)],
            "int8": lambda q: [int(id) for id, _ in everything.search(q, K)],
            "a twentieth": lambda q: [int(id) for id, _ in brisk.search(q, K)],
        }
        best, results, plaid = take_turns(methods, data[length], rounds, peer, length)
        exact = [np.argsort(-scores)[:K].tolist() for scores in results["einsum 16"]]
        einsum = min(best[f"einsum {block}"] for block in EINSUM_BLOCKS)
        label = f"{name}, {tokens} tokens: "
        for method, bar in (("bottega", BARS["einsum"]), ("int8", None), ("a twentieth", None)):
            ratio, share = einsum / best[method], recall(results[method], exact)
            wanted = None if method == "a twentieth" else BARS["recall"]
            found.append(line(f"{label}{method}, einsum / it", ratio, bar))
            found.append(line(f"{label}{method}, recall@{K}", share, wanted))
        ours = {
            name: (best[name], recall(results[name], exact)) for name in ("bottega", "a twentieth")
        }
        found += plaid_lines(label, plaid, exact, ours, peer)
    return found


def take_turns(
    methods: dict[str, Callable[[Vectors], Any]],
    questions: Vectors,
    rounds: int,
    peer: Plaid | None,
    length: str,
) -> tuple[dict[str, float], dict[str, list[Any]], list[dict[str, Any]]]:
    """Return the best CPU seconds per question over the rounds, and the results."""
    best: dict[str, float] = dict.fromkeys(methods, float("inf"))
    results: dict[str, list[Any]] = {}
    plaid: list[dict[str, Any]] = []
    for _ in range(rounds):
        for name, ask in methods.items():
            start = time.process_time()
            results[name] = [ask(query) for query in questions]
            best[name] = min(best[name], cpu(start) / len(questions))
        if peer is not None and peer.reason is None:
            new = peer.round(length)
            plaid = [min(p, q, key=lambda r: r["seconds"]) for p, q in zip(plaid or new, new)]  # noqa: B905
    return best, results, plaid


def plaid_lines(
    label: str,
    plaid: list[dict[str, Any]],
    exact: list[list[int]],
    ours: dict[str, tuple[float, float]],
    peer: Plaid | None,
) -> list[dict[str, Any]]:
    """Compare with fast-plaid's fastest setting, which has the lowest recall, and with its best
    recall.
    """
    if peer is None:
        return []
    if not plaid:
        return [skipped(f"{label}fast-plaid", str(peer.reason))]
    fastest = min(plaid, key=lambda one: one["seconds"])
    best = max(recall(one["ids"], exact) for one in plaid)
    its_own = recall(fastest["ids"], exact)
    lines = [line(f"{label}fast-plaid's fastest, recall@{K}", its_own, None)]
    for name, (seconds, share) in ours.items():
        ratio = fastest["seconds"] / seconds
        lines.append(line(f"{label}fast-plaid's fastest / {name}", ratio, BARS["fast-plaid"]))
        lines.append(line(f"{label}{name}'s recall over that", share / its_own, 1.0))
    lines.append(
        line(f"{label}bottega's recall over fast-plaid's best", ours["bottega"][1] / best, 1.0)
    )
    return lines


class Plaid:
    """fast-plaid in another process, one request at a time. `reason` explains its absence."""

    def __init__(self, python: str | None, data: dict[str, NDArray[np.float32]]) -> None:
        self.reason: str | None = None
        if python is None:
            self.reason = "not installed here; give --plaid-python"
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokens.npz"
            np.savez(path, **data)  # type: ignore[arg-type]
            self._process = subprocess.Popen(
                [python, str(PEER), str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            built = self._answer()
        if built is None:
            self.reason = "it failed; see its error above"
        else:
            print(f"# fast-plaid's index: {built['build']:.0f} CPU s")

    def round(self, length: str) -> list[dict[str, Any]]:
        """Return seconds and ids with each setting."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{length}\n")
        self._process.stdin.flush()
        found: list[dict[str, Any]] = self._answer()
        return found

    def _answer(self) -> Any:
        """Return the next line of JSON; None if the process has ended."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.startswith(("{", "[")):
                return json.loads(text)
        return None


def recall(found: list[list[int]], exact: list[list[int]]) -> float:
    pairs = zip(found, exact, strict=True)
    return float(np.mean([len(set(some) & set(best)) / len(best) for some, best in pairs]))


def line(name: str, value: float, bar: float | None, at_least: bool = True) -> dict[str, Any]:
    value = float(value)
    met = None if bar is None else value >= bar if at_least else value <= bar
    return {"name": name, "value": value, "bar": bar, "at_least": at_least, "met": met}


def skipped(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "skipped": reason}


def cpu(start: float) -> float:
    return time.process_time() - start


if __name__ == "__main__":
    main()
