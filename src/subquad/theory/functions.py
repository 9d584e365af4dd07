"""Functions from sequences to sequences, (d, n) → (d, n), for the proof: named ones, or the user's own.

A function is called with an array of Fractions on the grid, so that a rational function stays exact, and with float64
elsewhere. One that cannot take Fractions (most of `np.sin`, `np.exp` …) is given float64 on the grid too.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

Function = Callable[[np.ndarray], Any]


def _sine(x: np.ndarray) -> np.ndarray:
    angles = np.pi * np.asarray(x, dtype=float).sum(1, keepdims=True)
    return np.broadcast_to(np.sin(angles), x.shape)


def _wave(x: np.ndarray) -> np.ndarray:
    return np.sin(np.pi * np.cumsum(np.asarray(x, dtype=float), 1))


FUNCTIONS: dict[str, Function] = {
    "reverse": lambda x: x[:, ::-1],
    "sum": lambda x: x.sum(1, keepdims=True) + 0 * x,
    "mean": lambda x: x.sum(1, keepdims=True) / x.shape[1] + 0 * x,
    "product": lambda x: x.prod(1, keepdims=True) + 0 * x,
    "sort": lambda x: np.sort(x, 1),
    "max": lambda x: x.max(1, keepdims=True) + 0 * x,
    "sine": _sine,
}
CAUSAL_FUNCTIONS: dict[str, Function] = {
    "cumsum": lambda x: np.cumsum(x, 1),
    "first": lambda x: x[:, :1] + 0 * x,
    "cummax": lambda x: np.maximum.accumulate(x, 1),
    "wave": _wave,
}


def named(function: str | Function | None, causal: bool) -> Function:
    """A function by its name; None = reverse (causal: cumsum)."""
    if function is None:
        function = "cumsum" if causal else "reverse"
    if not isinstance(function, str):
        if not callable(function):
            raise TypeError(f"function is {function!r}; it must be a name or a callable (d, n) → (d, n)")
        return function
    known = CAUSAL_FUNCTIONS if causal else {**FUNCTIONS, **CAUSAL_FUNCTIONS}
    if function not in known:
        raise ValueError(f"function is {function!r}; the functions are {', '.join(known)}, or module:function")
    return known[function]


def evaluate(function: Function, x: np.ndarray) -> np.ndarray:
    """f at a point (d, n) of float64."""
    return _checked(function(x), x).astype(float)


def evaluate_exactly(function: Function, x: np.ndarray) -> np.ndarray:
    """f at a point (d, n) of Fractions, as Fractions; a float is taken as the fraction it is."""
    try:
        got = function(x)
    except (TypeError, AttributeError):
        got = function(x.astype(float))
    values = _checked(got, x)
    exact = [Fraction(v if isinstance(v, (int, float, Fraction)) else float(v)) for v in values.flat]
    return np.array(exact, dtype=object).reshape(x.shape)


def _checked(got: Any, x: np.ndarray) -> np.ndarray:
    values = np.asarray(got, dtype=object)
    if values.shape != x.shape:
        raise ValueError(f"function returns shape {values.shape}; it must be (d, n) = {x.shape}")
    for value in values.flat:
        try:
            finite = bool(np.isfinite(float(value)))
        except (TypeError, ValueError):
            finite = False
        if not finite:
            raise ValueError(f"function returns {value!r} at {x.astype(float).tolist()}; it must return finite numbers")
    return values
