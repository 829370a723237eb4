"""A check: a function that takes a drafter's maker and returns one `Result`, whatever the drafter does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from spec_jax.drafters.base import Drafter
from spec_jax.testing import TableModel

Make = Callable[[TableModel], Drafter]
_LONGEST = 400  # characters of an error


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
      name: of the check.
      passed: whether the draft conforms.
      detail: one line: what was tested, on how many samples, and the result.
    """

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f'{"pass" if self.passed else "FAIL"}  {self.name}: {self.detail}'


class Fault(Exception):
    """A draft does not conform; the message is the detail of the result."""


def checked(function: Callable[[Make], str]) -> Callable[[Make], Result]:
    """Makes a check of a function that returns its detail or raises `Fault` or any exception of a drafter."""

    @functools.wraps(function)
    def run(make: Make) -> Result:
        try:
            return Result(function.__name__, True, function(make))
        except Fault as fault:
            return Result(function.__name__, False, str(fault))
        except Exception as error:  # a user's drafter can raise anything
            message = ' '.join(str(error).split())[:_LONGEST]
            return Result(function.__name__, False, f'{type(error).__name__}: {message}')

    return run
