"""List the files of the project that one request passes: `python -m benchmarks.request_files`.

A chat completion with one demonstration is sent to a gateway in this process, over HTTP and with an
HTTP upstream; every function of `src/bottega` that is called meanwhile counts its file.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

from tests.gateway.harness import harness, raw, user_messages
from tests.gateway.upstreams import upstream
from tests.server import ok, running

SOURCE = f"{Path(__file__).parents[1] / 'src' / 'bottega'}/"


class FileProfiler:
    """Profiler that collects the files of all called functions while `active`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.active = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if self.active and event == "call" and file.startswith(SOURCE):
            self.files.add(file.removeprefix(SOURCE))


def files_of_a_completion() -> list[str]:
    """Return the files that a chat completion with a demonstration passes."""
    profiler = FileProfiler()
    threading.setprofile(profiler)
    sys.setprofile(profiler)
    try:
        with running() as server, tempfile.TemporaryDirectory() as folder:
            server.answers = [ok("a cat"), ok("a dog")]
            small, large = upstream(server), upstream(server)
            with harness(Path(folder), apprentice=small, master=large) as found:
                raw(
                    found, user_messages(1), "bottega/master"
                )  # its answer becomes the demonstration
                found.wait(1)
                profiler.active = True
                reply = raw(found, user_messages(2))
                found.wait(2)
                profiler.active = False
                assert reply.headers["x-bottega-demonstrations"] == "1"
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(profiler.files)


def main() -> None:
    files = files_of_a_completion()
    print("\n".join([*files, f"{len(files)} files"]))


if __name__ == "__main__":
    main()
