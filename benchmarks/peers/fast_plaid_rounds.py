"""fast-plaid in an environment of its own: fast_plaid_rounds.py TOKENS.npz

Prints a line of JSON after the index is built, and one for each requested group of questions: CPU
seconds and retrieved ids, for every setting.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

# n_full_scores, n_ivf_probe: from its defaults down to where recall is gone.
SETTINGS = ((4096, 8), (1024, 4), (256, 2), (64, 1))


def main() -> None:
    from fast_plaid import search  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    held = np.load(sys.argv[1])
    documents = [torch.from_numpy(rows) for rows in held["documents"]]
    queries = {name: [torch.from_numpy(q[None]) for q in held[name]] for name in ("short", "long")}
    with tempfile.TemporaryDirectory() as folder:
        index = search.FastPlaid(index=folder, device="cpu")
        start = time.process_time()
        index.create(documents_embeddings=documents)
        answer({"build": time.process_time() - start})
        for name in sys.stdin:
            answer([rounds(index, queries[name.strip()], *setting) for setting in SETTINGS])


def rounds(index: Any, queries: list[Any], scored: int, probed: int) -> dict[str, Any]:
    start = time.process_time()
    found = [
        index.search(
            query, top_k=20, n_full_scores=scored, n_ivf_probe=probed, show_progress=False
        )[0]
        for query in queries
    ]
    seconds = (time.process_time() - start) / len(queries)
    return {"seconds": seconds, "ids": [[int(id) for id, _ in hits] for hits in found]}


def answer(content: object) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main()
