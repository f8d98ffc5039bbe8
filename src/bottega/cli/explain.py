"""How one answer came about: its demonstrations, and the search that chose them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from bottega.cli.components import open_traces
from bottega.cli.inspection import print_trace
from bottega.cli.knowledge_files import check_filled, open_rows
from bottega.cli.options import Json, Namespace, TraceFile
from bottega.cli.output import console, note, print_json, say, shown
from bottega.errors import SettingError
from bottega.evaluation.explanation import ENDED, format_value, image_hashes, render
from bottega.image import Image
from bottega.recording import StoredCandidate, StoredNode, StoredTrace, StoredTree

SHORT = 48
ALONE = "the question alone"


def explain(
    trace: Annotated[
        str,
        typer.Argument(metavar="TRACE", help="A trace that bottega log lists, or its beginning."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Draw it as a page of its own.")
    ] = None,
    kb: Annotated[
        Path | None,
        typer.Option(metavar="K.db", help="The knowledge base whose pictures the page shows."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="The question's own image, as traces hold none; may be repeated."),
    ] = None,
    traces: TraceFile = None,
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Show how an answer came about, with the tree of the search that chose what was shown."""
    if out is None and (kb or image):
        raise SettingError("only a page has pictures", hint="--out FILE.html writes one")
    with closing(open_traces(traces)) as store:
        found = store.get(trace)
    if json:
        print_json(found)
    else:
        print_trace(found)
        if found.tree is not None:
            _print_tree(found.tree, found.question)
    if out is not None:
        pictures = _given(image or (), found) | _known(kb, namespace, found)
        page = render(found, pictures, absent=_absent(kb))
        out.write_text(page, encoding="utf-8", errors="replace", newline="\n")
        note(f"wrote {out}")


def _given(files: Sequence[Path], trace: StoredTrace) -> dict[str, Image]:
    images = {image.sha256: image for image in map(Image.open, files)}
    for sha256, image in images.items():
        if sha256 not in trace.images:
            raise SettingError(
                f"{image.source} is not what trace {trace.id} was asked about",
                hint="--image takes the same file again",
            )
    return images


def _known(kb: Path | None, namespace: str, trace: StoredTrace) -> dict[str, Image]:
    if kb is None:
        return {}
    with open_rows(kb, namespace) as knowledge:
        check_filled(knowledge, kb, namespace)
        return knowledge.images(image_hashes(trace))


def _absent(kb: Path | None) -> str:
    if kb is None:
        return "a trace holds none; --kb names the knowledge base that has them"
    return f"{kb} does not have them, or they are damaged there; --image gives the question's own"


def _print_tree(tree: StoredTree, question: str) -> None:
    say(
        f"search:   ended {ENDED[tree.ended]}; {tree.requests} requests, {tree.calls} calls;"
        " ● is the chosen sequence"
    )
    names = [_name(one, question) for one in tree.demonstrations]
    drawn = Tree(_line(names, tree.root, chosen=True), guide_style="dim")
    _grow(drawn, names, tree.root, tree.path)
    console.print(drawn, soft_wrap=True)


def _grow(
    drawn: Tree, names: Sequence[Text], node: StoredNode, way: tuple[int, ...] | None
) -> None:
    """`way` is the rest of the chosen path, None beside it."""
    for place, child in enumerate(node.children):
        rest = way[1:] if way and way[0] == place else None
        line = _line(names, child, chosen=rest is not None)
        _grow(drawn.add(line), names, child, rest)


def _line(names: Sequence[Text], node: StoredNode, *, chosen: bool) -> Text:
    name = shown(ALONE, "bold") if node.demonstration is None else names[node.demonstration]
    line = shown("● ", "bold") + name if chosen else shown("○ ", "dim") + name
    line += shown(f"  Q {format_value(node.value)}  N {node.visits}", "cyan")
    if node.answer is not None:
        said = node.answer.text if node.answer.valid else f"(invalid) {node.answer.text}"
        line += shown(f"  → {_short(said)}", "bold" if chosen else "")
    rewards = ", ".join(f"{name} {format_value(worth)}" for name, worth in node.rewards.items())
    return line + shown(f"  ({rewards})") if rewards else line


def _name(one: StoredCandidate, question: str) -> Text:
    """Its question only where it is another one than the query's."""
    name = shown(_short(one.answer or "a passage"), "bold")
    name += shown("" if one.text == question else f"  {_short(one.text)}")
    return name + shown(f"  {one.id[:8]}", "dim") if one.id else name


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[: SHORT - 1]}…"
