"""Type checks of user input; numpy's numbers count, booleans don't."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Integral, Real


def is_integer(value: object) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a value is a real number, NaN and infinities included."""
    return isinstance(value, Real) and not isinstance(value, bool)


def are_integers(values: object) -> bool:
    """Whether a value is a collection of whole numbers, empty ones included; strings and mappings are none."""
    if not isinstance(values, Collection) or isinstance(values, (str, bytes, Mapping)):
        return False
    return all(map(is_integer, values))


def check(name: str, value: object, valid: bool, expectation: str) -> None:
    """Refuses an invalid value.

    Raises:
        ValueError: names the value and what is expected.
    """
    if not valid:
        raise ValueError(f"{name}={value!r}: expected {name} {expectation}")


def check_positive(name: str, value: object) -> None:
    """Refuses everything but integers from 1 on.

    Raises:
        ValueError: names the value and what is expected.
    """
    if not is_integer(value):
        raise ValueError(f"{name}={value!r}: expected {name} to be an integer")
    if value < 1:  # type: ignore[operator]
        raise ValueError(f"{name}={value}: expected {name} >= 1")
