"""Translation of errors of PostgreSQL and its driver into those of Bottega."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bottega.errors import (
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
)

CONNECTION_LOST = ("08003", "08006", "57P01", "57P02")  # SQLSTATE codes


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Translate errors of the driver and of the network into those of Bottega."""
    import asyncpg

    try:
        yield
    except asyncpg.exceptions.ClientConfigurationError as error:
        raise StoreError(
            f"the URL of {name} is invalid: {error}",
            hint="correct the options after the ? of the URL",
        ) from error
    except asyncpg.InterfaceError as error:
        # After a lost connection the rollback fails too: report the first error.
        first: BaseException | None = error
        while isinstance(first, asyncpg.InterfaceError):
            first = first.__context__
        cause = first if isinstance(first, asyncpg.PostgresError) else error
        raise _translation(cause, name) from error
    except (asyncpg.PostgresError, asyncpg.InternalClientError) as error:
        raise _translation(error, name) from error
    except TimeoutError as error:
        raise StoreBusyError(
            f"{name} has no free connection: the process uses all of its pool",
            hint="try again, or use fewer threads at once",
        ) from error
    except OSError as error:
        raise unavailable(name, error.strerror or str(error) or type(error).__name__) from error


def no_answer(name: str, seconds: float | None) -> StoreBusyError:
    return StoreBusyError(
        f"{name} does not answer in {seconds or 0:g} s",
        hint="check the load and the disk of the PostgreSQL server",
    )


def unavailable(name: str, reason: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"{name} cannot be reached: {reason}",
        hint="start the server, or correct host and port in the URL",
    )


def _translation(error: Exception, name: str) -> StoreError:
    state = str(getattr(error, "sqlstate", "") or "")
    # Further lines may contain values of rows; the log of the server has them.
    text = next(iter(str(error).splitlines()), type(error).__name__)[:200]
    match state:
        case "28P01" | "28000":
            return StoreError(
                f"{name} rejects the user or the password",
                hint="correct user and password in its URL, PGPASSWORD or ~/.pgpass",
            )
        case "3D000":
            return StoreError(f"{name} does not exist", hint="create the database: createdb NAME")
        case "42501" if "extension" in text:
            return StoreError(
                f"{name} lacks the extension vector, and this user may not create it",
                hint="run CREATE EXTENSION vector in the database as a superuser",
            )
        case "42501":
            return StoreError(
                f"{name} refuses an operation: {text}",
                hint="connect as the owner of the tables, or grant this user CREATE on the schema"
                " to create them, or ALL on existing tables and sequences",
            )
        case "22003" if "halfvec" in text:
            return StoreError(
                f"{name} cannot index a vector with absolute values above 65,504",
                hint="use metric='cosine', or an embedder with smaller values",
            )
        case "25006":
            return StoreReadOnlyError(
                f"{name} is read-only, for example a replica",
                hint="use the URL of the primary server",
            )
        case "53100":
            return StoreFullError(
                f"{name} cannot grow: no space left on its disk",
                hint="free disk space on the server and try again; stored data is intact",
            )
        case "53300":
            return StoreBusyError(
                f"{name} accepts no more connections: {text}",
                hint="stop other clients, or raise max_connections of the server; a bottega process"
                " uses up to 10 connections per URL and kind of data",
            )
        case "55P03" | "40001" | "40P01" | "57014":
            return StoreBusyError(
                f"{name} is busy: {text}", hint="try again when other statements have finished"
            )
        case "0A000" | "58P01" if "vector" in text:
            return StoreError(
                f"{name} lacks the extension vector",
                hint="install pgvector 0.8 or newer on the server and run CREATE EXTENSION vector",
            )
    if state.startswith(("08", "57P")) and state not in CONNECTION_LOST:
        return unavailable(name, text)
    if state in CONNECTION_LOST or not state:
        return StoreUnavailableError(
            f"{name} closed the connection: {text}",
            hint="try again when the server accepts connections",
        )
    return StoreError(f"{name} failed: {text}", hint="check the log of the PostgreSQL server")
