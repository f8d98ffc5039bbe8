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


def concerns_one(error: BottegaError) -> bool:
    """True if the next question may well be answered."""
    if isinstance(error, RejectedError):
        return error.status not in FOR_ALL
    if isinstance(error, UnreachableError):
        return False
    return isinstance(error, ImageError) or (isinstance(error, GenerationError) and error.retryable)


@dataclass
class Contact:
    """A web page comes from a wrong address or from a busy proxy. It was a wrong address if nothing
    has been answered when more pages came than requests are sent at once."""

    answered: bool = False
    pages: int = 0

    def passes(self, error: BottegaError, at_once: int) -> bool:
        if not isinstance(error, GarbledError):
            return False
        self.pages += 1
        return self.answered or self.pages <= at_once


def first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of a task group's errors, the first one raised on purpose, else the first of any kind."""
    expected, others = errors.split(BottegaError)
    error: BaseException = (expected or others or errors).exceptions[0]
    return first(error) if isinstance(error, BaseExceptionGroup) else error
