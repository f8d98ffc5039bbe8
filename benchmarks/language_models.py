"""Text tasks of docs/experiments/language-models.md, and a local server for a GGUF model.

    python -m benchmarks.language_models tasks --questions TREC --reviews MR --news test.csv
    python -m benchmarks.language_models serve model.gguf     # needs xllamacpp

`tasks` writes a folder with train.jsonl and test.jsonl for each task and part: `dev` to choose
settings, then 0, 1 and 2. No text of a test.jsonl is in another file of its task.
"""

from __future__ import annotations

import argparse
import csv
import html
import json
import random
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SEED = 0
PARTS = ("dev", "0", "1", "2")
TRAIN, TEST = 1000, 200
WORDS = 20  # longer texts are left out: a prompt holds five
SLOTS = 20  # concurrent requests; also the most samples of one request (majority)
QUESTION_TYPES = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "person",
    "LOC": "location",
    "NUM": "number",
}
TOPICS = {"1": "world", "2": "sports", "3": "business", "4": "technology"}
AGENCY = re.compile(r"\s*\([\w. ]+\)$")  # "... (AP)"

Rows = Iterable[tuple[str, str]]  # text and label


def questions(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the questions of TREC (Li and Roth, 2002) with their coarse types."""
    for name in ("train_5500.label", "TREC_10.label"):
        for line in (folder / name).read_text("latin-1").splitlines():
            kind, _, text = line.partition(" ")
            yield re.sub(r" (?=[?.,!'])", "", text), QUESTION_TYPES[kind.partition(":")[0]]


def reviews(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the sentences of film reviews (Pang and Lee, 2005)."""
    for name, label in (("rt-polarity.pos", "positive"), ("rt-polarity.neg", "negative")):
        for line in (folder / name).read_text("latin-1").splitlines():
            yield re.sub(r" (?=[.,!?;']|n't)", "", line.strip()), label


def news(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the headlines of AG News (Zhang et al., 2015) without the agency."""
    with file.open(encoding="utf-8", newline="") as lines:
        for topic, title, _ in csv.reader(lines):
            # The published file has lost the ampersand of some entities.
            entities = re.sub(r" ?(?<!&)(#\d+;|\b(?:quot|amp|lt|gt);)", r"&\1", title)
            plain = re.sub("<[^>]*>", "", html.unescape(entities))
            yield AGENCY.sub("", plain).strip(), TOPICS[topic]


def write_parts(name: str, rows: Rows, folder: Path) -> None:
    """Sample all parts of a task and write them."""
    by_text = dict(rows)
    short = sorted(row for row in by_text.items() if 3 <= len(row[0].split()) <= WORDS)
    random.Random(SEED).shuffle(short)
    pool = short[len(PARTS) * TEST :]
    for index, part in enumerate(PARTS):
        train = random.Random(SEED + index).sample(pool, TRAIN)
        target = folder / f"{name}-{part}"
        target.mkdir(parents=True, exist_ok=True)
        _write(target / "train.jsonl", train)
        _write(target / "test.jsonl", short[index * TEST : (index + 1) * TEST])


def _write(file: Path, rows: Rows) -> None:
    lines = [json.dumps({"question": text, "labels": [label]}) for text, label in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def serve(model: Path, port: int) -> None:
    """Serve a GGUF model on loopback until interrupted: one thread."""
    import xllamacpp

    settings: Any = xllamacpp.CommonParams()
    settings.model.path = str(model)
    settings.hostnames, settings.port = ["127.0.0.1"], port
    settings.n_ctx, settings.n_parallel, settings.kv_unified = 4096, SLOTS, True
    settings.cache_ram_mib, settings.swa_full = (
        0,
        True,
    )  # the default keeps gigabytes of old prompts
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)
    print(f"export OPENAI_BASE_URL={server.listening_address}/v1", flush=True)
    while True:
        time.sleep(3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    tasks = commands.add_parser("tasks", help="Write the three tasks.")
    tasks.add_argument("--questions", type=Path, required=True, help="folder of TREC")
    tasks.add_argument("--reviews", type=Path, required=True, help="folder of rt-polarity")
    tasks.add_argument("--news", type=Path, required=True, help="test.csv of AG News")
    tasks.add_argument("--out", type=Path, default=Path("lm"))
    server = commands.add_parser("serve", help="Serve a GGUF model.")
    server.add_argument("model", type=Path)
    server.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    if args.command == "serve":
        serve(args.model, args.port)
    else:
        write_parts("questions", questions(args.questions), args.out)
        write_parts("reviews", reviews(args.reviews), args.out)
        write_parts("news", news(args.news), args.out)


if __name__ == "__main__":
    main()
