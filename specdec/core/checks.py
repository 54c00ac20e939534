"""Type checks of user input; numpy's numbers count, booleans don't."""

from __future__ import annotations

from numbers import Integral, Real


def is_integer(value: object) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a value is a real number, NaN and infinities included."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_positive(name: str, value: object) -> None:
    """Refuses everything but integers from 1 on.

    Raises:
        ValueError: names the value and what is expected.
    """
    if not is_integer(value):
        raise ValueError(f"{name}={value!r}: expected {name} to be an integer")
    if value < 1:  # type: ignore[operator]
        raise ValueError(f"{name}={value}: expected {name} >= 1")
