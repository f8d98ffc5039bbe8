"""Second process of benchmarks/stores.py: reports when its own search finds a row."""

from __future__ import annotations

import sys

from benchmarks.stores import PrecomputedEmbedder, clustered
from bottega import KnowledgeBase


def main() -> None:
    vectors = clustered(2000)
    with KnowledgeBase.open(sys.argv[1], PrecomputedEmbedder(vectors)) as kb:
        for line in sys.stdin:
            number = int(line)
            found = ""
            while found != str(number):
                found = kb.nearest(vectors[number][None], 1)[0][0].example.query.text
            print(number, flush=True)


if __name__ == "__main__":
    main()
