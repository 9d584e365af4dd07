"""subquad: full attention at sub-quadratic cost, for PyTorch."""

from subquad.attention.base import Attention, Capabilities
from subquad.attention.registry import attention, available, register, unregister
from subquad.core.options import Options, option
from subquad.layers import MultiheadAttention

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "Capabilities",
    "MultiheadAttention",
    "Options",
    "attention",
    "available",
    "option",
    "register",
    "unregister",
]
