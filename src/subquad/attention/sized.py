"""Mechanisms over a support that has a size, such as a span, a stride or a number of columns.

The size is decided when the module is made: by its option, else from `max_length`. With neither it follows from the
length of each call, and then the same tokens in a longer batch are divided differently.
"""

from __future__ import annotations

from typing import Any, ClassVar

from subquad.attention.base import Attention
from subquad.core.numbers import settled
from subquad.supports.support import text_of


class SizedAttention(Attention):
    free_size: ClassVar[str] = ""  # the option that, left open, follows the length
    _is_sized: bool

    def with_sizes(self, support: Any) -> Any:
        """The support, with its sizes decided as far as they can be without a call."""
        if self.options.max_length is not None:
            support = support.sized(self.options.max_length)
        self._is_sized = support.sized(4) == support
        return support

    def text_for(self, support: Any, slots: int) -> str:
        """Its text, with sizes decided for a call; where they were open, a compiled graph is one for this length."""
        if self._is_sized:
            return text_of(support)
        return text_of(support, settled(slots, self.name, self.free_size, f"give max_length or {self.free_size}"))

    @property
    def open_size(self) -> str | None:
        return None if self._is_sized else self.free_size

    @property
    def _follows_length(self) -> bool:
        return getattr(self.options, self.free_size, 1) is None and self.options.max_length is None

    @property
    def exponent(self) -> float:
        """√n keys or summaries per query where the size follows the length; a fixed size leaves n/size of them."""
        return 1.5 if self._follows_length else 2.0
