"""The command `bottega explain`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

from rich.text import Text
from rich.tree import Tree
from typer import Argument, Option

from bottega._util.locations import StoreLocation
from bottega._util.progress import plural
from bottega.cli.components import stored_traces
from bottega.cli.inspection import print_trace
from bottega.cli.options import Json, Namespace, RecordedTraces, knowledge_option
from bottega.cli.output import console, note, print_json, say, shown
from bottega.errors import SettingError
from bottega.evaluation.knowledge_rows import check_filled, open_rows
from bottega.evaluation.report.explanation import (
    ENDED,
    format_value,
    image_hashes,
    render_explanation,
)
from bottega.image import Image
from bottega.recording import StoredCandidate, StoredNode, StoredTrace

SHORT = 48


def explain(
    trace: Annotated[
        str, Argument(metavar="TRACE", help="Trace id of bottega log, or its beginning.")
    ],
    out: Annotated[Path | None, Option(metavar="FILE.html", help="Write an HTML page.")] = None,
    kb: Annotated[
        StoreLocation | None,
        knowledge_option(
            help="Knowledge base with the images of the demonstrations, for the page."
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Image of the question, for the page; may be repeated."),
    ] = None,
    traces: RecordedTraces = None,
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Explain an answer: its demonstrations and the search tree that chose them."""
    if out is None and (kb or image):
        raise SettingError("--kb and --image need a page", hint="add --out FILE.html")
    with closing(stored_traces(traces)) as store:
        found = store.get(trace)
        hashes = image_hashes(found) if out is not None else ()
        images = {one: kept for one in hashes if (kept := store.image(one)) is not None}
    if json:
        print_json(found)
    else:
        print_trace(found)
        if found.tree is not None:
            tree = found.tree
            say(
                f"search:   ended {ENDED[tree.ended]}; {plural(tree.requests, 'request')},"
                f" {plural(tree.calls, 'completion')}; ● is the chosen sequence"
            )
            names = [_name(one, found.question) for one in tree.demonstrations]
            root = Tree(_line(names, tree.root, chosen=True), guide_style="dim")
            _grow(root, names, tree.root, tree.path)
            console.print(root, soft_wrap=True)
    if out is not None:
        images |= _question_images(image or (), found)
        if kb is not None:
            with open_rows(kb, namespace) as knowledge:
                check_filled(knowledge, kb, namespace)
                images |= knowledge.images(hashes)
        page = render_explanation(found, images, absent=_absent(found, images, kb))
        out.write_text(page, encoding="utf-8", errors="replace", newline="\n")
        note(f"wrote {out}")


def _absent(trace: StoredTrace, images: Collection[str], kb: StoreLocation | None) -> str:
    """Return why images are missing on the page, and the options that provide them."""
    lacking = image_hashes(trace).difference(images)
    options = []
    if kb is None and lacking.difference(trace.images):
        options.append("--kb to a knowledge base that has those of the examples")
    if lacking.intersection(trace.images):
        options.append("--image to the image of the question")
    where = "the traces" if kb is None else f"the traces and {kb}"
    advice = f"; set {', and '.join(options)}" if options else ""
    return f"{where} lack them or hold damaged ones{advice}"


def _question_images(files: Sequence[Path], trace: StoredTrace) -> dict[str, Image]:
    images = {image.sha256: image for image in map(Image.open, files)}
    for sha256, image in images.items():
        if sha256 not in trace.images:
            raise SettingError(
                f"{image.source} is not an image of trace {trace.id}",
                hint="set --image to the original file",
            )
    return images


def _grow(
    parent: Tree, names: Sequence[Text], node: StoredNode, path: tuple[int, ...] | None
) -> None:
    """Add the children of a node; `path` is the rest of the chosen path, None off the path."""
    for index, child in enumerate(node.children):
        rest = path[1:] if path and path[0] == index else None
        line = _line(names, child, chosen=rest is not None)
        _grow(parent.add(line), names, child, rest)


def _line(names: Sequence[Text], node: StoredNode, *, chosen: bool) -> Text:
    index = node.demonstration
    name = shown("no demonstrations", "bold") if index is None else names[index]
    line = shown("● ", "bold") + name if chosen else shown("○ ", "dim") + name
    line += shown(f"  Q {format_value(node.value)}  N {node.visits}", "cyan")
    if node.answer is not None:
        answer = node.answer.text if node.answer.valid else f"(invalid) {node.answer.text}"
        line += shown(f"  → {_short(answer)}", "bold" if chosen else "")
    rewards = ", ".join(f"{name} {format_value(value)}" for name, value in node.rewards.items())
    return line + shown(f"  ({rewards})") if rewards else line


def _name(one: StoredCandidate, question: str) -> Text:
    """Return the demonstration's answer, with its question if it differs from the query's."""
    name = shown(_short(one.answer or "passage"), "bold")
    name += shown("" if one.text == question else f"  {_short(one.text)}")
    return name + shown(f"  {one.id[:8]}", "dim") if one.id else name


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[: SHORT - 1]}…"
