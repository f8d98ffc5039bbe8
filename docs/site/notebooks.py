"""Notebooks of examples/ as pages: executed, with their outputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

SECONDS = 120  # for one cell


def write_notebook(source: Path, target: Path) -> None:
    """Execute a notebook and write it as a page. Raises `CellExecutionError` for a failed cell."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(notebook_page(executed(source)), encoding="utf-8")


def executed(source: Path) -> NotebookNode:
    """Return a notebook with the outputs of its cells."""
    notebook: NotebookNode = nbformat.read(source, as_version=4)
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning of the debugger
    quiet = ["--IPKernelApp.log_level=40"]  # no warning about unencrypted local sockets
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", extra_arguments=quiet)
    client.execute(cwd=str(source.parent))
    return notebook


def notebook_page(notebook: NotebookNode) -> str:
    """Return an executed notebook as Markdown: its texts, its code and the outputs."""
    blocks: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            blocks.append(cell.source)
        else:
            blocks.append(f"```python\n{cell.source}\n```")
            blocks += [block for output in cell.outputs for block in _blocks(output)]
    return "\n\n".join(blocks) + "\n"


def _blocks(output: NotebookNode) -> Iterator[str]:
    """Yield the best form of an output. Messages on stderr are those of libraries."""
    if output.output_type == "stream":
        if output.name == "stdout":
            yield f"```text\n{output.text.rstrip()}\n```"
    elif html := output.data.get("text/html"):
        # A blank line would end the HTML block.
        lines = (line for line in html.splitlines() if line.strip())
        yield f'<div class="output">{"".join(lines)}</div>'
    elif text := output.data.get("text/plain"):
        yield f"```text\n{text}\n```"
