"""Which failures concern one question, and which would meet every question."""

from __future__ import annotations

from bottega.errors import (
    BottegaError,
    GenerationError,
    ImageError,
    RejectedError,
    UnreachableError,
)

# A wrong key, a forbidden or an unknown model. A 400 may be about this one image.
FOR_ALL = {401, 403, 404}


def concerns_one(error: BottegaError) -> bool:
    """True if the next question may well be answered."""
    if isinstance(error, RejectedError):
        return error.status not in FOR_ALL
    if isinstance(error, UnreachableError):
        return False
    return isinstance(error, ImageError) or (isinstance(error, GenerationError) and error.retryable)


def first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of a task group's errors, the first one raised on purpose, else the first of any kind."""
    expected, others = errors.split(BottegaError)
    error: BaseException = (expected or others or errors).exceptions[0]
    return first(error) if isinstance(error, BaseExceptionGroup) else error
