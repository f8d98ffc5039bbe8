"""The example notebook: executed in a kernel, with its outputs, and as a page."""

from __future__ import annotations

import re

import nbformat
import pytest

from docs.site.notebooks import executed, notebook_page
from tests.paths import ROOT

NOTEBOOK = ROOT / "examples" / "visual_rag.ipynb"


@pytest.mark.slow
def test_the_example_notebook_displays_its_objects_and_progress() -> None:
    notebook = executed(NOTEBOOK)
    outputs = [one for cell in notebook.cells if cell.cell_type == "code" for one in cell.outputs]
    pages = [one.data["text/html"] for one in outputs if "text/html" in one.get("data", {})]
    expected = ("200 examples", "8 × 8", "Demonstrations in the order shown", 'value="40"')
    for words in (*expected, "confidence", "95 % interval", "expected"):
        assert any(words in page for page in pages), words
    assert not any("<script" in page for page in pages)
    printed = "".join(one.text for one in outputs if one.get("name") == "stdout")
    assert re.search(r"[34]\d of 40 correct", printed)
    assert not any(cell.get("outputs") for cell in nbformat.read(NOTEBOOK, as_version=4).cells)


def test_a_notebook_becomes_a_page_with_its_outputs() -> None:
    cell = nbformat.v4.new_code_cell("trace")
    cell.outputs = [
        nbformat.v4.new_output("stream", name="stdout", text="done\n"),
        nbformat.v4.new_output("stream", name="stderr", text="a warning of a library"),
        nbformat.v4.new_output("execute_result", {"text/html": "<b>\n\nx</b>", "text/plain": "x"}),
        nbformat.v4.new_output("execute_result", {"text/plain": "Trace(...)"}),
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Title"), cell])
    assert notebook_page(notebook) == (
        "# Title\n\n```python\ntrace\n```\n\n```text\ndone\n```\n\n"
        '<div class="output"><b>x</b></div>\n\n```text\nTrace(...)\n```\n'
    )
