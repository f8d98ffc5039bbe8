"""Actors for tests of executors."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import EmbedderMismatchError, SettingError


@dataclass(frozen=True)
class Work:
    """Item of a `CountingActor`: `number`, or one of the behaviours."""

    number: int = 0
    fails: bool = False
    raises_unpicklable: bool = False
    kills: bool = False
    kills_once: Path | None = None
    waits: Path | None = None


@dataclass(frozen=True)
class Done:
    number: int
    process: int
    built: int


class UnpicklableError(Exception):
    """Error that cannot be unpickled: its constructor takes two values and `args` has one."""

    def __init__(self, name: str, state: str) -> None:
        super().__init__(f"{name} is {state}")


class CountingActor:
    """Actor that returns its item; `folder` gets a file for each actor that is built or closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built = len(list(folder.glob("built-*")))
        (folder / f"built-{os.getpid()}-{self._built}").touch()

    async def __call__(self, work: Work) -> Done:
        if work.fails:
            raise EmbedderMismatchError("one", "another", hint=f"item {work.number}")
        if work.raises_unpicklable:
            raise UnpicklableError(f"item {work.number}", "broken")
        if work.kills or (work.kills_once and not work.kills_once.exists()):
            if work.kills_once:
                work.kills_once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if work.waits is not None:
            await self._wait(work.waits)
        return Done(work.number, os.getpid(), self._built)

    async def aclose(self) -> None:
        (self._folder / f"closed-{os.getpid()}").touch()

    async def _wait(self, folder: Path) -> None:
        (folder / "started").touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            (folder / "cancelled").touch()
            raise


@dataclass(frozen=True)
class CountingFactory:
    folder: Path

    def __call__(self) -> CountingActor:
        return CountingActor(self.folder)


@dataclass(frozen=True)
class FailingFactory:
    def __call__(self) -> CountingActor:
        raise SettingError("the model does not exist", hint="check its name")


class LockedFactory:
    """Factory that cannot be pickled."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()

    def __call__(self) -> CountingActor:
        return CountingActor(self._folder)
