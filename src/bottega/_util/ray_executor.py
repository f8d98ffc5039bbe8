"""Executor on a Ray cluster, with one actor per worker process."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import secrets
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from bottega._util.executor import Actor, ActorFactory
from bottega._util.progress import plural
from bottega.errors import BottegaError, SettingError, WorkerError, require_extra

T = TypeVar("T")
R = TypeVar("R")

RAY, RAY_CLIENT = "ray", "ray://"
CLOSE_SECONDS = 10
RETRIES = 2  # of an item whose worker process ended
CONNECTIONS = 4  # attempts to connect through a client port
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # The driver prints Ray's messages to standard output, except those that match.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
# Bind to loopback. Ray ignores the parameter 127.0.0.1; this setting is meant for macOS.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# An attempt to reach a cluster takes half a minute. Ray would make 20.
ONE_ATTEMPT = {"RAY_NUM_REDIS_GET_RETRIES": "1"}


class RayExecutor:
    """Executor with `count` worker processes of a Ray cluster, each with one CPU.

    `address` is `ray` for the cluster that RAY_ADDRESS names, else a private cluster on loopback,
    or `ray://HOST:PORT` for the client port of another cluster. `count` defaults to the CPUs of the
    machine or cluster. An existing connection to Ray is reused and left open. Raises
    `MissingDependencyError` without Ray, and `SettingError` for a cluster that cannot be used.
    """

    def __init__(self, address: str = RAY, count: int | None = None) -> None:
        check_address(address)
        self._ray, self._is_own = _connected(address, count)
        try:
            cpus = int(self._ray.cluster_resources().get("CPU", 0))
            self.count = count or cpus
            if not 0 < self.count <= cpus:
                raise SettingError(
                    f"the Ray cluster has {plural(cpus, 'CPU')}, got"
                    f" {plural(self.count, 'worker')}",
                    hint=f"set --workers to {cpus} or less"
                    if cpus
                    else "add machines to the cluster",
                )
            _check_versions(self._ray)
        except BaseException:
            self.close()
            raise

    def start(self, factory: ActorFactory[T, R], *, concurrency: int) -> Actor[T, R]:
        ray = self._ray
        try:
            stored = ray.put(factory)
        except Exception as error:  # pickle raises many types
            raise SettingError(
                f"the job cannot be sent to Ray workers: {_first_line(error.__cause__ or error)}",
                hint="pass names and settings instead of live objects, or run without --on",
            ) from error
        remote = ray.remote(
            num_cpus=1,
            max_restarts=-1,
            max_task_retries=RETRIES,
            max_concurrency=max(1, concurrency),
        )(_ActorProcess)
        return RayWorkers(ray, [remote.remote() for _ in range(self.count)], stored)

    def close(self) -> None:
        if self._is_own:
            self._ray.shutdown()


class RayWorkers(Generic[T, R]):
    """Actors in worker processes. An item goes to the one with the fewest unfinished items."""

    def __init__(self, ray: Any, actors: list[Any], factory: Any) -> None:
        self._ray, self._actors = ray, actors
        # Sent with each call, because a restarted process builds its actor again. In a list, Ray
        # passes the reference instead of the object, which the cluster keeps while this exists.
        self._factory = [factory, str(Path.cwd())]
        self._unfinished = [0] * len(actors)

    async def __call__(self, item: T, /) -> R:
        index = self._unfinished.index(min(self._unfinished))
        self._unfinished[index] += 1
        try:
            result = await self._result(self._actors[index].call.remote(item, self._factory))
        finally:
            self._unfinished[index] -= 1
        if isinstance(result, _Failure):
            raise result.error
        return cast(R, result)

    async def _result(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        future = asyncio.wrap_future(reference.future())
        try:
            # Without the shield the future would be cancelled, and Ray's client then fails in the
            # thread that receives all replies.
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(asyncio.Future.exception)  # else asyncio reports it
            self._ray.cancel(reference)
            raise
        except errors.RayTaskError as error:
            # A bug in an actor: its traceback is in the message. Ray's client omits its type.
            raise error.as_instanceof_cause() from None
        except errors.RayError as error:
            raise WorkerError(
                f"the worker ended {RETRIES + 1} times during this item: {_first_line(error)}",
                hint="set fewer --workers or add memory, and repeat the command to retry the item",
            ) from error

    async def aclose(self) -> None:
        """Close the actors and end their processes."""
        closing = [actor.close.remote() for actor in self._actors]
        with suppress(TimeoutError):  # a worker may still be computing a cancelled item
            async with asyncio.timeout(CLOSE_SECONDS):
                # Errors are ignored: an ended worker needs no closing.
                await asyncio.gather(*closing, return_exceptions=True)
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []


class _Failure:
    """Error of an item, returned as a value because Ray adds its traceback to raised errors."""

    def __init__(self, error: BottegaError) -> None:
        self.error = error


class _ActorProcess:
    """Ray actor that builds the job's actor at the first call and passes items to it."""

    def __init__(self) -> None:
        self._actor: Actor[Any, Any] | None = None
        self._building = asyncio.Lock()

    async def call(self, item: Any, factory: list[Any]) -> Any:
        try:
            async with self._building:
                if self._actor is None:
                    build = await _received(factory[0])
                    if await asyncio.to_thread(Path(factory[1]).is_dir):
                        os.chdir(factory[1])  # settings may contain relative paths
                    self._actor = await asyncio.to_thread(build)
            return await self._actor(item)
        except BottegaError as error:
            return _Failure(error)
        except Exception as error:
            raise _picklable(error) from error.__cause__

    async def close(self) -> None:
        if self._actor is not None:
            await self._actor.aclose()


def _picklable(error: Exception) -> Exception:
    """Return the error, or a `RuntimeError` with its text if it cannot be pickled and unpickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickle raises many types
        text = f"{type(error).__name__}: {error}"
        return RuntimeError(text).with_traceback(error.__traceback__)
    return error


async def _received(factory: Any) -> Callable[[], Actor[Any, Any]]:
    try:
        return cast(Callable[[], Actor[Any, Any]], await factory)
    except Exception as error:  # pickle raises many types
        raise SettingError(
            f"a Ray worker cannot load the job: {_first_line(error)}",
            hint="install the same packages on all machines of the cluster",
        ) from error


def check_address(address: str) -> None:
    """Raise `SettingError` for an invalid address, and `MissingDependencyError` without Ray."""
    port = address.removeprefix(RAY_CLIENT).rpartition(":")[2]
    if address != RAY and not (address.startswith(RAY_CLIENT) and port.isdecimal()):
        raise SettingError(
            f"--on must be local, ray or ray://HOST:PORT, got {address!r}",
            hint="set --on ray, or --on ray://HOST:10001",
        )
    require_extra("ray", "batch")
    if address != RAY:
        require_extra("grpc", "batch")


def _connected(address: str, count: int | None) -> tuple[Any, bool]:
    """Connect to the cluster. Return the module `ray` and whether the connection is new."""
    existing = address if address != RAY else os.environ.get("RAY_ADDRESS")
    settings = ENVIRONMENT | (ONE_ATTEMPT if existing else LOOPBACK)
    for name, value in settings.items():  # read when ray is imported
        os.environ.setdefault(name, value)
    if not existing:
        # Without a token, Ray creates ~/.ray/auth_token.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    if ray.is_initialized():
        return ray, False
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    try:
        if existing:
            join(ray, existing, quiet)
        else:
            ray.init("local", num_cpus=count or _cpus(), include_dashboard=False, **quiet)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError and others
        raise SettingError(
            f"the Ray cluster {existing or address} cannot be used: {_first_line(error)}",
            hint="check the address or RAY_ADDRESS; set RAY_AUTH_MODE and RAY_AUTH_TOKEN as in the"
            " cluster; use the same versions of Python and Ray on all machines",
        ) from error
    return ray, True


def join(ray: Any, address: str, settings: dict[str, Any]) -> None:
    """Connect to a cluster. Retry if the process that it forks for a client dies, as it does in a
    few percent of all cases (https://github.com/ray-project/ray/issues/63202)."""
    for _ in range(CONNECTIONS - 1):
        with suppress(ConnectionAbortedError):
            ray.init(address, **settings)
            return
    ray.init(address, **settings)


def _check_versions(ray: Any) -> None:
    """Raise `SettingError` unless the cluster has the same version of Bottega."""
    own = bottega_version()
    try:
        other = ray.get(ray.remote(num_cpus=0)(bottega_version).remote())
    except Exception as error:  # a missing module, or a cluster that ends
        raise SettingError(
            f"the Ray cluster cannot run Bottega: {_first_line(error)}",
            hint=f"install version {own} on all of its machines",
        ) from error
    if other != own:
        raise SettingError(
            f"the Ray cluster has Bottega {other}, this process {own}",
            hint="install the same version on all machines",
        )


def bottega_version() -> str:
    """Return the version of Bottega. Its root package is above this layer: import it here."""
    return str(import_module("bottega").__version__)


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _first_line(error: BaseException) -> str:
    """Return the first line; append the last one if the first introduces a traceback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]
