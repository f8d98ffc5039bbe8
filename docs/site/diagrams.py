"""Diagrams of the documents as SVG files: `python -m docs.site.diagrams` writes docs/diagrams.

Boxes are on a grid, and arrows connect the midpoints of their sides. Colours follow the reader's
light or dark mode; in the site, that of its theme.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from docs.site.pages import DOCS

FOLDER = DOCS / "diagrams"
COLUMN, ROW = 190, 96  # distances of the grid
WIDTH, HEIGHT = 152, 56  # of a box
MARGIN = 12
STYLE = """\
svg.diagram { --ink: #24211d; --soft: #6a635a; --fill: #f4f1ea; --accent: #dcebe0; --line: #b9b0a3;
  font: 13px system-ui, sans-serif; max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { svg.diagram { --ink: #e9e6e1; --soft: #a8a197;
  --fill: #26252b; --accent: #1f3a2b; --line: #5a5650; } }
.diagram text { fill: var(--ink); text-anchor: middle; } .diagram .label { fill: var(--soft); }
.diagram .side { text-anchor: start; }
.diagram rect { fill: var(--fill); stroke: var(--line); } .diagram .model { fill: var(--accent); }
.diagram .arrow { fill: none; stroke: var(--soft); stroke-width: 1.4; }
.diagram .head { fill: var(--soft); }"""


@dataclass(frozen=True)
class Box:
    """Box in a column and row of the grid, with one or two lines. A model is coloured."""

    column: float
    row: float
    text: str
    model: bool = False

    @property
    def centre(self) -> tuple[float, float]:
        return (
            MARGIN + self.column * COLUMN + WIDTH / 2,
            MARGIN + self.row * ROW + HEIGHT / 2,
        )


@dataclass(frozen=True)
class Point:
    """Midpoint of a box's side: left, right, top or bottom (l, r, t, b)."""

    box: Box
    side: str

    @property
    def outward(self) -> tuple[int, int]:
        return {"l": (-1, 0), "r": (1, 0), "t": (0, -1), "b": (0, 1)}[self.side]

    @property
    def horizontal(self) -> bool:
        return self.side in "lr"

    @property
    def tip(self) -> tuple[float, float]:
        (x, y), (dx, dy) = self.box.centre, self.outward
        return x + dx * WIDTH / 2, y + dy * HEIGHT / 2


@dataclass(frozen=True)
class Diagram:
    """Boxes by name and the arrows between their sides, such as `store:b aggregate:t`, with an
    optional label after a bar."""

    title: str
    boxes: dict[str, Box]
    arrows: tuple[str, ...]

    def svg(self) -> str:
        columns = max(box.column for box in self.boxes.values())
        rows = max(box.row for box in self.boxes.values())
        width = 2 * MARGIN + columns * COLUMN + WIDTH
        height = 2 * MARGIN + rows * ROW + HEIGHT
        parts = [self._arrow(*arrow.partition(" | ")) for arrow in self.arrows]
        parts += [_box(box) for box in self.boxes.values()]
        title = escape(self.title)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" role="img"'
            f' aria-label="{title}" viewBox="0 0 {width:g} {height:g}" width="{width:g}">\n'
            f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
        )

    def _arrow(self, ends: str, _: str, label: str) -> str:
        start, end = (Point(self.boxes[name], side) for name, _, side in _named(ends))
        return _arrow(start, end, label)


def _named(ends: str) -> list[tuple[str, str, str]]:
    return [end.partition(":") for end in ends.split()]


def _box(box: Box) -> str:
    x, y = box.centre
    kind = ' class="model"' if box.model else ""
    lines = box.text.split("\n")
    texts = "".join(
        f'<text x="{x:g}" y="{y + 4.5 + 17 * (i - (len(lines) - 1) / 2):g}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    corner = f'x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}"'
    return f'<rect{kind} {corner} width="{WIDTH}" height="{HEIGHT}" rx="8"/>{texts}'


def _arrow(start: Point, end: Point, label: str) -> str:
    """Return an arrow that leaves and enters boxes at right angles, with at most two bends."""
    (x, y), (tip_x, tip_y) = start.tip, end.tip
    dx, dy = end.outward
    x2, y2 = tip_x + 7 * dx, tip_y + 7 * dy  # the base of the head
    if start.horizontal and end.horizontal:
        path = f"M{x:g} {y:g}H{(x + tip_x) / 2:g}V{y2:g}H{x2:g}"
    else:
        path = f"M{x:g} {y:g}" + (f"H{x2:g}V{y2:g}" if start.horizontal else f"V{y2:g}H{x2:g}")
    head = " ".join(
        f"{hx:g},{hy:g}"
        for hx, hy in (
            (tip_x, tip_y),
            (tip_x + 8 * dx + 4.5 * dy, tip_y + 8 * dy + 4.5 * dx),
            (tip_x + 8 * dx - 4.5 * dy, tip_y + 8 * dy - 4.5 * dx),
        )
    )
    text = ""
    if label and x == tip_x:  # beside a vertical arrow
        middle = (y + tip_y) / 2 + 4
        text = f'<text class="label side" x="{x + 9:g}" y="{middle:g}">{escape(label)}</text>'
    elif label:
        row = y - 7 if start.horizontal else y2 + 16
        text = f'<text class="label" x="{(x + tip_x) / 2:g}" y="{row:g}">{escape(label)}</text>'
    return f'<path class="arrow" d="{path}"/><polygon class="head" points="{head}"/>{text}'


DIAGRAMS = {
    "pipeline": Diagram(
        "A query is routed, examples are retrieved and re-ranked, a model is prompted, its reply is"
        " parsed and the trace recorded",
        {
            "query": Box(0, 0, "query\nimage, question"),
            "route": Box(1, 0, "route\nwhich model?"),
            "retrieve": Box(2, 0, "retrieve\ncandidates"),
            "rerank": Box(3, 0, "re-rank\nwhich, in which order"),
            "prompt": Box(3, 1, "prompt\ndemonstrations"),
            "generate": Box(2, 1, "generate\nthe model's reply", model=True),
            "parse": Box(1, 1, "parse\nanswer, confidence"),
            "record": Box(0, 1, "record\ntrace, cost"),
        },
        (
            "query:r route:l",
            "route:r retrieve:l",
            "retrieve:r rerank:l",
            "rerank:b prompt:t",
            "prompt:l generate:r",
            "generate:l parse:r",
            "parse:l record:r",
        ),
    ),
    "visual-rag": Diagram(
        "Visual RAG: the nearest labelled images become demonstrations in the prompt",
        {
            "query": Box(0, 0, "photograph"),
            "embed": Box(1, 0, "embedder\na vector"),
            "kb": Box(2, 0, "knowledge base\nlabelled images"),
            "demos": Box(2, 1, "nearest images\nwith labels"),
            "prompt": Box(1, 1, "prompt\nthe nearest last"),
            "model": Box(0, 1, "small model\nanswers", model=True),
        },
        (
            "query:r embed:l",
            "embed:r kb:l",
            "kb:b demos:t",
            "demos:l prompt:r",
            "prompt:l model:r",
        ),
    ),
    "cache-of-thought": Diagram(
        "Cache-of-Thought: a router chooses apprentice or master; the master's answers are stored"
        " and become the apprentice's demonstrations",
        {
            "query": Box(0, 0.5, "question\nwith images"),
            "router": Box(1, 0.5, "router\nbudget, coverage"),
            "master": Box(2, 0, "master\nlarge, expensive", model=True),
            "apprentice": Box(2, 1, "apprentice\nsmall, cheap", model=True),
            "cache": Box(3, 0.5, "cache\nthe master's answers"),
        },
        (
            "query:r router:l",
            "router:r master:l",
            "router:r apprentice:l",
            "master:r cache:t | stores",
            "cache:b apprentice:r | demonstrates",
        ),
    ),
    "rcts": Diagram(
        "RCTS: a tree search tries sequences of demonstrations, rewards the answers and keeps the"
        " best branch",
        {
            "candidates": Box(0, 0, "20 candidates\nwith rationales"),
            "tree": Box(1, 0, "tree search\nchoose a sequence"),
            "model": Box(2, 0, "model\nanswers with it", model=True),
            "reward": Box(2, 1, "reward\nis it consistent?"),
            "update": Box(1, 1, "update the tree\nvalue, visits"),
            "answer": Box(0, 1, "answer of\nthe best branch"),
        },
        (
            "candidates:r tree:l",
            "tree:r model:l",
            "model:b reward:t",
            "reward:l update:r",
            "update:t tree:b | 10 rollouts",
            "update:l answer:r",
        ),
    ),
    "racc": Diagram(
        "RACC: passages are compressed in advance; for a question, a network turns the compressed"
        " passages into a KV prefix of the model",
        {
            "passages": Box(0, 0, "passages"),
            "compress": Box(1, 0, "compressor\nonce, in advance", model=True),
            "store": Box(2, 0, "store\n16 prompts each"),
            "question": Box(0, 1, "question"),
            "retrieve": Box(1, 1, "retrieve\n5 passages"),
            "aggregate": Box(2, 1, "aggregator\nscores, question"),
            "prefix": Box(3, 1, "KV prefix"),
            "model": Box(3, 0, "frozen model\nanswers", model=True),
        },
        (
            "passages:r compress:l",
            "compress:r store:l",
            "store:b aggregate:t",
            "question:r retrieve:l",
            "retrieve:r aggregate:l",
            "aggregate:r prefix:l",
            "prefix:t model:b",
        ),
    ),
}


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for name, diagram in DIAGRAMS.items():
        (folder / f"{name}.svg").write_text(diagram.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
