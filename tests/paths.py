"""Paths of the checkout; tests do not depend on the working directory."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # papers and data sets; tests that read it skip where it is missing
