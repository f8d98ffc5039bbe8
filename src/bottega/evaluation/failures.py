"""Which failures concern one question, and which would meet every question."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.errors import (
    BottegaError,
    GarbledError,
    GenerationError,
    ImageError,
    RejectedError,
    UnreachableError,
)

# A wrong key, a forbidden or an unknown model. A 400 may be about this one image.
FOR_ALL = {401, 403, 404}


@dataclass
class Reached:
    """Whether the model has answered anything yet."""

    yes: bool = False


def concerns_one(error: BottegaError, reached: bool = False) -> bool:
    """True if the next question may well be answered. A web page is a wrong address, unless there
    were answers from it: then it is a busy proxy's."""
    if reached and isinstance(error, GarbledError):
        return True
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
