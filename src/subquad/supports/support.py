"""A support is a value: a frozen description with a text form, from which everything else about it follows.

The definition (index sets, masks), the plans for the kernels, the picture, the cost and the input of the theory are all
read off the same object. Operators carry the text, `patterns.Strided(causal=True, w=16)`, and look the plan up for the
length that they are called with: a compiled or exported graph holds a description, not a list of blocks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor

from subquad.supports.parts import Plan
from subquad.supports.placed import Placed

Function = TypeVar("Function")

_GIVEN: WeakValueDictionary[int, Any] = WeakValueDictionary()  # supports that are made of a user's own functions
_NUMBERS = count()


class Within(NamedTuple):
    """The part of a longer plan that is the plan of fewer tokens: its first queries, the first keys of each source."""

    rows: Any
    keys: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Support:
    """Who may attend to whom, for every length n. Sizes that are None follow from a length: see `sized`."""

    causal: bool = False

    @property
    def text(self) -> str:
        """The description that operators carry; `parse` is the inverse."""
        return f"{type(self).__module__.rpartition('.')[2]}.{self!r}"

    def sized(self, n: int) -> Support:
        """The same with every size decided, for sequences of up to n tokens."""
        return self

    def plan(self, n: int, which: str) -> Plan:
        """The blocks of one of its attentions for length n; `which` names it, such as "main"."""
        raise TypeError(f"{type(self).__name__} has no plan {which!r}")

    def within(self, which: str, length: Any) -> Within | None:
        """What of the plan of any longer sequence is the plan of `length` tokens, a number or a tensor of them.

        None: it is no part of it, because the sets of a query depend on how many tokens there are.
        """
        return None

    def beside(self, which: str, n: int, lengths: Tensor) -> tuple[str, list[Placed]] | None:
        """For rows of lengths (B,), of n at most: a plan that has a part `within` it for fewer tokens, and all other
        pairs of `which`, whose places follow from the lengths.
        """
        return None

    def halves(self, which: str) -> tuple[str, str] | None:
        """Two plans with the pairs of `which`, the first of which has a part `within` it for fewer tokens. The second
        is a mirror image: there fewer tokens are a part of more where they are the last ones, instead of the first.
        """
        return None


class GivenSupport(Support):
    """A support made of a user's own function or sets, which no text can hold: its text is a number in this process."""

    @property
    def text(self) -> str:
        number = self.__dict__.get("_number")
        if number is None:
            number = next(_NUMBERS)
            object.__setattr__(self, "_number", number)
            _GIVEN[number] = self
        return f"given:{number}"

    # a function is what it is: two supports are the same only if they are one object
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getstate__(self) -> dict[str, Any]:
        """A copy, in this process or another, gets a number of its own."""
        return {key: value for key, value in self.__dict__.items() if key != "_number"}


def constant_of_graphs(function: Function) -> Function:
    """A decorator: what the function returns is a constant of compiled graphs.

    It is torch.compiler.assume_constant_result, which imports torch._dynamo, and that takes as long as importing torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_of_graphs
def text_of(support: Support, n: int | None = None) -> str:
    """The text of a support, with open sizes decided for length n: a constant of a compiled graph."""
    return (support if n is None else support.sized(n)).text


def parse(text: str) -> Support:
    """The support that a text describes."""
    if not text.startswith("given:"):
        return _parse(text)
    found = _GIVEN.get(int(text.removeprefix("given:")))
    if found is None:
        raise ValueError(f"support {text!r} belongs to a mechanism that does not exist in this process")
    return found


@lru_cache(maxsize=256)
def _parse(text: str) -> Support:
    name, _, arguments = text.partition("(")
    module, _, kind = name.partition(".")
    call = ast.parse(f"f({arguments}", mode="eval").body
    assert isinstance(call, ast.Call)
    options = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    return getattr(import_module(f"subquad.supports.{module}"), kind)(**options)


def plan_of(text: str, n: int, which: str = "main") -> Plan:
    """The plan of a support for length n."""
    return _given_plan(parse(text), n, which) if text.startswith("given:") else _plan(text, n, which)


@lru_cache(maxsize=128)
def _plan(text: str, n: int, which: str) -> Plan:
    return parse(text).plan(n, which)


@lru_cache(maxsize=16)
def _given_plan(support: Support, n: int, which: str) -> Plan:
    return support.plan(n, which)


# ---- the plans of a batch -------------------------------------------------------------------------------------


def plans(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lengths: Tensor | None,
    support: str,
    which: str,
    n: int,
) -> Iterator[tuple[slice, Plan]]:
    """Consecutive batch elements of equal length, and the plan of that length; empty elements are left out."""
    sizes, first = [n] * len(q) if lengths is None else lengths.tolist(), 0
    for b in range(1, len(q) + 1):
        if b == len(q) or sizes[b] != sizes[first]:
            if sizes[first] > 0 or lengths is None:
                plan = plan_of(support, sizes[first], which)
                check_tensors(q, keys, values, plan, f"the plan {which} of {support} for {sizes[first]} tokens")
                yield slice(first, b), plan
            first = b


def check_tensors(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], plan: Plan, about: str) -> None:
    """Refuse tensors that are shorter than the plan: kernels would read beyond their end."""
    if q.shape[2] < plan.rows:
        raise ValueError(f"q has {q.shape[2]} rows, and {about} has {plan.rows}")
    for name, tensors in (("keys", keys), ("values", values)):
        needed = max(plan.reaches, default=-1) + 1
        if len(tensors) < needed:
            raise ValueError(f"{name} has {len(tensors)} source{'s' * (len(tensors) != 1)}, and {about} needs {needed}")
        for source, reach in plan.reaches.items():
            if tensors[source].shape[2] < reach:
                raise ValueError(f"{name}[{source}] has {tensors[source].shape[2]} keys, and {about} reaches {reach}")
