"""Which options of a mechanism the page offers, and which values of them: read off its class.

An option is offered if it changes who attends to whom or how many scores are computed. Values are the choices of a
text or a switch, and for numbers halves and doubles of the value that makes a good picture (`Attention.gallery`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from subquad.attention.base import Attention
from subquad.attention.registry import for_length, mechanism
from subquad.core.options import Field, Options, fields
from subquad.theory.sets import NOT_COPIED

HEADS, WIDTH = 4, 16  # of the mechanisms that are drawn; more heads of a pattern look the same
PROBED = 32  # tokens of the picture that says whether an option matters
UNSET = 8  # looked at where an option is left open
MOST = 18  # combinations of options of one mechanism


@dataclass(frozen=True)
class Control:
    """One option, its values, and which of them the page begins with."""

    name: str
    help: str
    values: tuple[Any, ...]
    start: int


def build(name: str, n: int, options: dict[str, Any], *, causal: bool) -> Attention:
    """The mechanism as it is drawn."""
    return for_length(name, n, causal=causal, num_heads=HEADS, head_dim=WIDTH, **options).eval()


def directions(cls: type[Attention]) -> list[bool]:
    """Whether it is causal, in each of its forms, the bidirectional one first."""
    able = cls.capabilities
    return [causal for causal in (False, True) if (able.causal if causal else able.bidirectional)]


def controls(name: str) -> list[Control]:
    """The options that matter, with few enough values that all combinations can be embedded."""
    cls = mechanism(name)
    shared = {field.name for field in fields(Options)}
    own = [field for field in fields(cls.Options) if field.name not in {*shared, *NOT_COPIED}]
    start = {field.name: cls.gallery.get(field.name, field.default) for field in own}
    choices = [{}, *({field.name: value} for field in own if _is_choice(field) for value in get_args(field.type))]
    seen: dict[str, Any] = {}
    found = []
    for field in own:
        wished = candidates(field, start[field.name])
        values = [value for value in wished if _matters(cls, field, value, start, choices, seen)]
        if len(values) > 1:
            found.append((field, values))
    _thin(found, start)
    return [Control(field.name, field.help, tuple(vs), vs.index(start[field.name])) for field, vs in found]


def combinations(found: list[Control]) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """Numbers of the values, and the options they make."""
    for numbers in itertools.product(*(range(len(control.values)) for control in found)):
        yield numbers, {c.name: c.values[at] for c, at in zip(found, numbers, strict=True)}


def candidates(field: Field, start: Any) -> list[Any]:
    """Values worth looking at, in order, with `start` among them."""
    if _is_choice(field):
        return list(get_args(field.type))
    if field.type is bool:
        return [False, True]
    members = get_args(field.type) or (field.type,)
    if float in members and isinstance(start, float):
        near = {start / 2, start, start * 2, *(float(limit) for sign, limit in field.limits.items() if sign in "≥≤")}
        return [value for value in sorted(near) if _inside(field, value)]
    if int not in members or isinstance(start, tuple):
        return [start]
    if start is None:
        near = {UNSET // 2, UNSET, UNSET * 2}
    else:
        near = {0, 1, 2} if start == 0 else {start // 4, start // 2, start, start * 2, start * 4}
    whole = [value for value in sorted(near) if _inside(field, value)]
    return [None, *whole] if type(None) in members else whole


def _is_choice(field: Field) -> bool:
    return get_origin(field.type) is Literal


def _inside(field: Field, value: float) -> bool:
    tests = {"≥": value.__ge__, ">": value.__gt__, "≤": value.__le__, "<": value.__lt__}
    return all(tests[sign](limit) for sign, limit in field.limits.items())


def _matters(
    cls: type[Attention], field: Field, value: Any, start: dict[str, Any], choices: list[dict], seen: dict[str, Any]
) -> bool:
    """Is this value the start, or does it change something beside some choice of the other options?

    `seen` keeps what has been looked at.
    """
    if value == start[field.name] and type(value) is type(start[field.name]):
        return True
    for choice in choices:
        for causal in directions(cls):
            before = _signature(cls, {**start, **choice}, causal, seen)
            after = _signature(cls, {**start, **choice, field.name: value}, causal, seen)
            if after is not None and before is not None and after != before:
                return True
    return False


def _signature(cls: type[Attention], options: dict[str, Any], causal: bool, seen: dict[str, Any]) -> Any:
    """What a reader would notice; None where the options do not go together."""
    key = repr((options, causal))
    if key not in seen:
        try:
            attention = build(cls.name, PROBED, {k: v for k, v in options.items() if v is not None}, causal=causal)
            picture = attention.picture(PROBED)
            seen[key] = tuple(picture.shape), picture.numpy().tobytes(), attention.connections(PROBED)
        except (ValueError, TypeError):
            seen[key] = None
    return seen[key]


def _thin(found: list[tuple[Field, list[Any]]], start: dict[str, Any]) -> None:
    """Take values away, the outermost of the longest lists of numbers, until few combinations are left."""
    while math.prod(len(values) for _, values in found) > MOST:
        field, values = max(found, key=lambda one: (not _is_choice(one[0]), len(one[1])))
        if len(values) <= 2:
            found.pop()
            continue
        kept = start[field.name]
        middle = values.index(UNSET if kept is None and UNSET in values else kept)
        spare = [at for at in range(len(values)) if values[at] is not None and values[at] != kept and at != middle]
        del values[max(spare, key=lambda at: abs(at - middle))]
