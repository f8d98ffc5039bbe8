"""Exceptions of this project. `hint` is the next step; `retryable` is true if a retry may succeed.

BottegaError
├── SettingError              a parameter, or a combination of parts, that cannot work
├── MissingDependencyError    an optional package is not installed
├── BudgetError               a request was not sent because it would exceed the budget
├── BatchError                some queries of a batch failed; it holds the other answers
├── ImageError                bytes that cannot be decoded, or may not be (too large)
│   └── TooManyPixelsError
├── LoadError                 a folder, a file or one row of it that cannot be read as examples
│   └── NoticeError           a remark on data; no example is skipped
├── EmbeddingError            an embedder that cannot be loaded or that failed
├── WorkerError               a worker process ended repeatedly during an item (retryable)
├── StoreError                a knowledge base or trace store that cannot be read or written
│   ├── EmbedderMismatchError the file was built with another embedder
│   ├── EmptyKnowledgeBaseError
│   ├── NotFoundError         no entry has this id
│   ├── LogPrunedError        the change log no longer holds these changes; read again from 0
│   ├── StoreBusyError        another writer holds the file (retryable)
│   ├── StoreUnavailableError the database server cannot be reached (retryable)
│   ├── StoreReadOnlyError    a file without write permission, or a replica of a database
│   └── StoreFullError        no space left; earlier data is intact
└── GenerationError           a model that did not answer
    ├── ModelLoadError        no such model, or not a vision-language model
    ├── PromptRejectedError   roles or images that the model's chat template does not accept
    │   └── PromptTooLongError  more tokens than the model can read
    ├── ReplayMissError       the record holds no answer to this request
    └── EndpointError         an HTTP endpoint that failed
        ├── UnreachableError  no connection (retryable)
        ├── EndpointTimeoutError                       (retryable)
        ├── RateLimitedError  429                      (retryable)
        ├── ServerFailedError 5xx, or a reply cut short (retryable)
        ├── RejectedError     4xx: the request or the key is wrong
        └── GarbledError      the reply is not the protocol's JSON (retryable)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, TypeVar

DISTRIBUTION = "bottega-vlm"  # `bottega` on the public index is another project
EXTRA_WITH_TORCH = "local"
CUDA_NOTE = (
    "; on Linux this takes about 6 GB (CUDA): without a GPU, first set PIP_EXTRA_INDEX_URL to"
    " PyTorch's index of CPU builds, see https://pytorch.org/get-started/locally/"
)


class BottegaError(Exception):
    """Base of all errors of this project. `str(error)` is one sentence and `hint` the next step. A
    traceback shows both."""

    retryable = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with `args`, but subclasses have other parameters.
        return _restored_error, (type(self), self.args), self.__dict__


def _restored_error(kind: type[BottegaError], args: tuple[Any, ...]) -> BottegaError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class SettingError(BottegaError):
    pass


class MissingDependencyError(BottegaError):
    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is required and not installed",
            hint=f"pip install '{DISTRIBUTION}[{extra}]'" + CUDA_NOTE * (extra == EXTRA_WITH_TORCH),
        )


@contextmanager
def store_errors(setting: str | None) -> Iterator[None]:
    """Add the setting that contains the URL to the hint of a `StoreError` of the block."""
    try:
        yield
    except StoreError as error:
        if setting is not None:
            named = f"the URL is that of {setting}"
            error.hint = f"{error.hint}; {named}" if error.hint else named
            error.add_note(f"hint: {named}")
        raise


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Raise `MissingDependencyError` if an import inside the block fails. An import of this
    package's own modules that fails is a bug, and its error is raised unchanged."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = error.name or "a package"
        if package.partition(".")[0] == __name__.partition(".")[0]:
            raise
        raise MissingDependencyError(package, extra) from error


def require_extra(module: str, extra: str) -> None:
    """Raise `MissingDependencyError` if a module is missing. It is not imported."""
    if find_spec(module) is None:
        raise MissingDependencyError(module, extra)


class BudgetError(BottegaError):
    """A request was not sent because it would exceed the budget."""


class BatchError(BottegaError):
    """Failure of some queries of a batch. `answers` has an `Answer` for each query, None for a
    failed one. `errors` maps the index of each failed query to its error."""

    def __init__(self, answers: Sequence[Any], errors: Mapping[int, Exception]) -> None:
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {len(answers)} queries failed, the first at index {first}:"
            f" {errors[first]}",
            hint="read the other answers from error.answers and each failure from error.errors",
        )
        self.answers, self.errors = answers, errors


class ImageError(BottegaError):
    pass


class TooManyPixelsError(ImageError):
    pass


class LoadError(BottegaError):
    pass


class NoticeError(LoadError):
    """Remark on data, such as files that are not images or copies of items. Loaders pass it only to
    `on_error`; no example is skipped."""


class EmbeddingError(BottegaError):
    pass


class WorkerError(BottegaError):
    """Worker processes ended repeatedly while computing an item."""

    retryable = True


class StoreError(BottegaError):
    pass


class EmbedderMismatchError(StoreError):
    """Knowledge base opened with another embedder. `stored` and `given` are fingerprints."""

    def __init__(self, stored: str, given: str, *, hint: str = "") -> None:
        super().__init__(
            f"the knowledge base was built with {stored!r} and was opened with {given!r}",
            hint=hint or f"open it with {stored!r}, or build a new file with {given!r}",
        )
        self.stored, self.given = stored, given


class EmptyKnowledgeBaseError(StoreError):
    pass


class NotFoundError(StoreError):
    pass


class LogPrunedError(StoreError):
    pass


class StoreBusyError(StoreError):
    retryable = True


class StoreUnavailableError(StoreError):
    retryable = True


class StoreReadOnlyError(StoreError):
    pass


class StoreFullError(StoreError):
    pass


class GenerationError(BottegaError):
    pass


class ModelLoadError(GenerationError):
    pass


class PromptRejectedError(GenerationError):
    pass


class PromptTooLongError(PromptRejectedError):
    pass


class ReplayMissError(GenerationError):
    pass


class EndpointError(GenerationError):
    """Failure of an HTTP endpoint. `status` is the HTTP status of the last attempt, None without a
    response. `retry_after` is the delay that the server requested, in seconds. `detail` is the
    server's own message, which may quote the request, and `fields` are the texts of its error."""

    detail = ""
    fields: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.retry_after = retry_after


class UnreachableError(EndpointError):
    retryable = True


class EndpointTimeoutError(EndpointError):
    retryable = True


class RateLimitedError(EndpointError):
    retryable = True


class ServerFailedError(EndpointError):
    retryable = True


class RejectedError(EndpointError):
    pass


class GarbledError(EndpointError):
    retryable = True


Error = TypeVar("Error", bound=BottegaError)

OnError = Callable[[BottegaError], None]
OnRowError = Callable[[LoadError | ImageError], None]


def error_handler(on_error: Callable[[Error], None] | None) -> Callable[[Error], None]:
    """Return `on_error`, or a handler that raises if it is None."""
    # Not `on_error or ...`: a callable that collects errors may be an empty list.
    return _raise if on_error is None else on_error


def _raise(error: BottegaError) -> None:
    raise error


def first_line(error: Exception) -> str:
    """Return the first line of another library's error message, at most 200 characters."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


def check_count(name: str, count: int, least: int = 1) -> None:
    """Raise `SettingError` unless `count` is a whole number of at least `least`."""
    if not hasattr(count, "__index__") or count < least:  # also accepts integers of numpy
        raise SettingError(
            f"{name} must be at least {least}, got {count}", hint=f"set {name}={least} or more"
        )


def check_scores(scores: Iterable[float]) -> None:
    """Raise `SettingError` unless all scores of candidates are finite."""
    if not all(map(math.isfinite, scores)):
        raise SettingError(
            "a candidate's score is not a finite number",
            hint="use a retriever that gives each candidate a finite score",
        )


def check_fraction(name: str, value: float) -> float:
    """Return the value. Raise `SettingError` unless it is between 0 and 1; NaN is not."""
    if not 0 <= value <= 1:
        raise SettingError(
            f"{name} must be between 0 and 1, got {value}", hint=f"set {name} between 0 and 1"
        )
    return value
