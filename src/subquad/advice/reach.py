"""In how many layers does every token reach every other? From the theory, at a short length where a long one would not
do.

The hop sets of Assumption 1.3 (`theory.hops`) are n² bits. For a long sequence they are computed at two lengths n/4^k
and n/4^(k+1), which leaves the ratio of √n to n/√n as it is, and continued: a number of layers that is the same at both
stays, one that grows is taken to go on like a power of n, or like log n where it grows by less than half.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from subquad.advice.points import Subject
from subquad.attention.registry import for_length
from subquad.theory.hops import hops
from subquad.theory.sets import plans_of, read

LONGEST = 1024  # tokens whose hop sets are computed


class Reach(NamedTuple):
    """`layers` until every token has seen every other (causal: every earlier one); None = some never do."""

    layers: int | None
    exact: bool = True  # computed at this length, or the same at all lengths that were
    by_content: bool = False  # whom a token sees is decided by the tokens: this is what may be, not what must

    def words(self) -> str:
        if self.layers is None:
            return "never"
        return f"{'' if self.exact else '≈ '}{self.layers:,}{' by content' if self.by_content else ''}"


def reach(subject: Subject, n: int) -> Reach | None:
    """None where the theory does not apply: a single token, or sets that are not declared."""
    lengths = [n]
    while lengths[-1] > LONGEST:
        lengths.append(lengths[-1] // 4)
    if n < 2:
        return None
    content = _by_content(for_length(subject.spec, 64, causal=subject.causal))
    try:
        found = _layers(subject, lengths[-1])
        if len(lengths) == 1 or found is None:
            return Reach(found, True, content)
        shorter = _layers(subject, lengths[-1] // 4)
    except (TypeError, ValueError):
        return None
    if shorter is None or found <= shorter:
        return Reach(found, True, content)
    return Reach(continued(lengths[-1], shorter, found, n), False, content)


def continued(length: int, shorter: int, found: int, n: int) -> int:
    """The number of layers at n, from that at length/4 and at length."""
    times = math.log(n / length, 4)
    if found < 1.5 * shorter:
        return round(found + times * (found - shorter))
    return round(found * (found / shorter) ** times)


def _layers(subject: Subject, n: int) -> int | None:
    support = read(subject.spec, n, causal=subject.causal)
    return hops(support.cycle, support.causal).steps


def _by_content(made: Any) -> bool:
    """A pattern has its sets, a Combiner reaches through summaries whom it does not see directly."""
    return bool(made.data_dependent) and not hasattr(made, "pattern") and not plans_of(made)
