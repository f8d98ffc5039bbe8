"""Build the documentation site: `python -m docs.site [FOLDER]`, by default into site/.

The pages are written to build/site, where zensical builds them in its strict mode: a wrong link or
anchor fails, and so does a page that the navigation lacks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from docs.site.navigation import NOTEBOOK_PAGE, write_config
from docs.site.notebooks import write_notebook
from docs.site.pages import ROOT, stage
from docs.site.references import write_references

STAGING = ROOT / "build" / "site"


def main(out: Path) -> int:
    shutil.rmtree(STAGING, ignore_errors=True)
    pages = STAGING / "pages"
    stage(pages)
    write_references(pages / "reference")
    write_notebook(ROOT / "examples" / "visual_rag.ipynb", pages / NOTEBOOK_PAGE)
    shutil.copy(Path(__file__).with_name("style.css"), pages)
    write_config(STAGING / "zensical.toml", pages)
    done = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=STAGING)
    if done.returncode == 0:
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(STAGING / "site", out)
        print(f"open {out / 'index.html'}; to search: python -m http.server --directory {out}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")))
