"""Server that imports large libraries once and runs each command in a fork of itself.

Importing them takes five CPU-seconds, more than most commands in the documents. A fork gets the
arguments, working directory, environment and files of the client, so output, pipes and exit codes
are those of a separate process. Linux only: elsewhere it is not safe to fork a process
that has loaded such libraries.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import socketserver
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STARTING_SECONDS = 120
SNIPPET = "snippet"  # program that runs its argument as Python code
CLIENT = """\
#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    call = [os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ)]
    socket.send_fds(connection, [b"f"], [0, 1, 2])
    connection.sendall(json.dumps(call).encode())
    connection.shutdown(socket.SHUT_WR)
    sys.exit(int(connection.recv(16) or 1))
"""


@contextmanager
def preloaded_programs() -> Iterator[Path | None]:
    """Yield a folder with `bottega` and `SNIPPET`, which run in forks; None if forks are unsafe."""
    if sys.platform != "linux":
        yield None
        return
    with TemporaryDirectory() as name:
        folder, address = Path(name), str(Path(name) / "socket")
        for program in ("bottega", SNIPPET):
            file = folder / program
            file.write_text(CLIENT.format(python=sys.executable, address=address))
            file.chmod(0o755)
        with subprocess.Popen([sys.executable, __file__, address]) as server:
            try:
                wait_until_ready(server, Path(address))
                yield folder
            finally:
                server.terminate()


def wait_until_ready(server: subprocess.Popen[bytes], address: Path) -> None:
    end = time.monotonic() + STARTING_SECONDS
    while not accepts(address):
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"server of preloaded programs did not start, exit {server.poll()}")
        time.sleep(0.05)


def accepts(address: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(address))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


class Handler(socketserver.BaseRequestHandler):
    """Handler of one command: it runs in a fork of the server, and forks again for the command."""

    def handle(self) -> None:
        _, files, _, _ = socket.recv_fds(self.request, 1, 3)
        if not files:  # the readiness check of `accepts`
            return
        with self.request.makefile("rb") as stream:
            call = json.load(stream)
        command = multiprocessing.get_context("fork").Process(target=run, args=(files, *call))
        command.start()
        command.join()
        code = command.exitcode or 0
        self.request.sendall(str(code if code >= 0 else 128 - code).encode())


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = 1000


def run(
    files: list[int], program: str, arguments: list[str], folder: str, environment: dict[str, str]
) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
    # The inherited streams still refer to the types and positions of the old files.
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # A fork recreates torch's thread pool at its first use, which is not safe in concurrent
    # threads, such as those that load weights.
    sys.modules["torch"].set_num_threads(1)
    if program == "bottega":
        from bottega.cli import main

        sys.argv = [program, *arguments]
        main()
    else:
        sys.argv, sys.path[0] = ["-c"], ""  # as `python -c` does
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(arguments[0], "<snippet>", "exec"), names)


def preload() -> None:
    import faiss  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import sklearn.linear_model  # noqa: F401
    import torch
    import transformers.modeling_utils  # noqa: F401
    from transformers.models.auto import processing_auto  # noqa: F401

    import bottega.generation.loaded  # noqa: F401
    from bottega.cli.app import lazy_commands

    for command in lazy_commands():
        command.load()
    torch.set_num_threads(1)  # a fork has none of its parent's threads


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    preload()
    with Server(sys.argv[1], Handler) as server:
        server.serve_forever()
