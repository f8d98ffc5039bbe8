from __future__ import annotations

import subprocess
import sys

WHILE_ANOTHER_LOADS = """
import asyncio, os, sys, threading
from bottega.generation import TransformersGenerator
from bottega._util.native import LOADING

with LOADING:
    model = TransformersGenerator("nobody/nothing")
    threading.Thread(target=lambda: asyncio.run(model.load()), daemon=True).start()
    threading.Event().wait(0.7)
    os._exit("torch" in sys.modules)
"""


def test_libraries_are_imported_by_one_thread_at_a_time() -> None:
    """An embedder and a generator that loaded together found transformers half imported."""
    done = subprocess.run([sys.executable, "-c", WHILE_ANOTHER_LOADS], timeout=60, check=False)
    assert done.returncode == 0
