"""Settings that must be numbers in a range, with errors that name them."""

from __future__ import annotations

import math


def check_not_negative(**settings: float) -> None:
    """ValueError unless each is a number from 0 on; infinity is one, NaN is not."""
    for name, value in settings.items():
        if not value >= 0:
            raise ValueError(f"{name} must be 0 or more, got {value}.")


def check_coefficient(**settings: float) -> None:
    """ValueError unless each is a finite number from 0 on."""
    for name, value in settings.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or more and finite, got {value}.")


def check_positive(**settings: float) -> None:
    """ValueError unless each is a finite number above 0."""
    for name, value in settings.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}.")


def check_window(low: float, high: float) -> None:
    """ValueError unless 0 <= low <= high; NaN is neither."""
    if not 0 <= low <= high:
        raise ValueError(f"The window must have 0 <= low <= high, got low {low} and high {high}.")


def check_count(**settings: int) -> None:
    """ValueError unless each is an integer from 1 on."""
    for name, value in settings.items():
        if not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{name} must be at least 1, and an integer, got {value}.")
