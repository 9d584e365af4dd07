"""subquad: full attention at sub-quadratic cost, for PyTorch.

Names are imported when they are first used: `import subquad` alone does not import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subquad.attention.base import Attention, Capabilities
    from subquad.attention.call import Record
    from subquad.attention.registry import attention, available, register, unregister
    from subquad.core.options import Options, option
    from subquad.experiments import Compared, ComparedSuite, Trained, compare, train
    from subquad.layers import MultiheadAttention
    from subquad.swapping import swap

__version__ = "0.2.0.dev0"
__all__ = [
    "Attention",
    "Capabilities",
    "Compared",
    "ComparedSuite",
    "MultiheadAttention",
    "Options",
    "Record",
    "Trained",
    "attention",
    "available",
    "compare",
    "option",
    "register",
    "swap",
    "train",
    "unregister",
]

_PLACES = {
    "Attention": "subquad.attention.base",
    "Capabilities": "subquad.attention.base",
    "Compared": "subquad.experiments",
    "ComparedSuite": "subquad.experiments",
    "MultiheadAttention": "subquad.layers",
    "Options": "subquad.core.options",
    "Record": "subquad.attention.call",
    "Trained": "subquad.experiments",
    "attention": "subquad.attention.registry",
    "available": "subquad.attention.registry",
    "compare": "subquad.experiments",
    "option": "subquad.core.options",
    "register": "subquad.attention.registry",
    "swap": "subquad.swapping",
    "train": "subquad.experiments",
    "unregister": "subquad.attention.registry",
}


_SUBMODULES = ("distributed", "hf", "models", "tasks", "testing", "theory", "training")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"subquad.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'subquad' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    """The public names: what this file imports for itself is left out."""
    return sorted({*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))})


class _Package(ModuleType):
    """`subquad.attention` is the function, also after `import subquad.attention.base`, where Python would put the
    package of that name in its place.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "attention" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
