"""What the derivatives of operators have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def no_second_derivative(name: str) -> Callable[..., Any]:
    """The derivative of a derivative that has none: says so."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{name} has no second derivative")

    return refuse
