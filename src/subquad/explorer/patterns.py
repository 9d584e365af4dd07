"""The first part of the explorer: every registered mechanism, drawn for a grid of its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from subquad.attention.base import Attention
from subquad.attention.registry import available, mechanism
from subquad.core.numbers import possible_pairs
from subquad.explorer import grid
from subquad.explorer.costs import LENGTHS as COST_LENGTHS
from subquad.explorer.costs import cost
from subquad.explorer.page import Blob, pack_bits, pack_cells, progressions
from subquad.plots import KINDS, panels, tally
from subquad.theory.hops import hops
from subquad.theory.sets import Family, read

LENGTHS = (16, 32, 64, 128)  # of the pictures
EVERYONE = (
    "Every token takes part in every output, through a factorisation or a transform: no score of a single pair is "
    "computed, and there are no sets to choose."
)
TYPICAL = "An example: "


def describe_patterns(names: Sequence[str] | None = None, tell: Callable[[str], Any] = lambda name: None) -> dict:
    """All that the page shows of these mechanisms (None: of all). `tell` is told which one is next."""
    found = []
    for name in available() if names is None else names:
        tell(name)
        found.append(describe_mechanism(name))
    return {"kinds": KINDS, "lengths": LENGTHS, "costLengths": COST_LENGTHS, "mechanisms": found}


def describe_mechanism(name: str) -> dict[str, Any]:
    """What stands on its class, its controls and, in a blob, a table of all combinations with the sets of each."""
    cls, blob = mechanism(name), Blob()
    offered = grid.controls(name)
    table = [
        {"at": numbers, "forms": [_form(cls, _given(cls, options), causal, blob) for causal in grid.directions(cls)]}
        for numbers, options in grid.combinations(offered)
    ]
    number = blob.add_json(table)
    return {
        "name": name,
        "family": cls.family,
        "paper": cls.paper,
        "cost": cls.cost,
        "about": _first_sentence(cls),
        "directions": ["causal" if causal else "bidirectional" for causal in grid.directions(cls)],
        "note": cls.picture_note and TYPICAL + cls.picture_note,
        "controls": [
            {"name": c.name, "help": c.help, "values": [_text(value) for value in c.values], "start": c.start}
            for c in offered
        ],
        "table": number,
        "blob": blob.text(),
    }


def _given(cls: type[Attention], options: dict[str, Any]) -> dict[str, Any]:
    """The options of a combination beside those of the gallery; None is what an option is when it is not given."""
    return {key: value for key, value in {**cls.gallery, **options}.items() if value is not None}


def _form(cls: type[Attention], options: dict[str, Any], causal: bool, blob: Blob) -> dict[str, Any]:
    """One combination in one direction, or why there is none."""
    try:
        cells = {str(n): sets_of(_built(cls.name, n, options, causal), n, blob) for n in LENGTHS}
        counted = cost(lambda n: _built(cls.name, n, options, causal))
    except (ValueError, TypeError) as error:
        return {"error": str(error)}
    everyone = not cls.picture_note and counted.exponent < 2 and all(one["everyone"] for one in cells.values())
    return {"sets": cells, "note": EVERYONE if everyone else "", **counted._asdict()}


def _built(name: str, n: int, options: dict[str, Any], causal: bool) -> Attention:
    with torch.random.fork_rng(devices=[]):  # parameters are drawn: the same ones each time
        torch.manual_seed(0)
        return grid.build(name, n, options, causal=causal)


def sets_of(attention: Attention, n: int, blob: Blob) -> dict[str, Any]:
    """The sets at length n: a picture for each kind of head, the families that layers cycle through, the summaries."""
    shown = panels(attention.picture(n))
    pairs = possible_pairs(n, attention.options.causal)
    found: dict[str, Any] = {
        "panels": [[heads, blob.add(pack_cells(picture.numpy()))] for heads, picture in shown],
        "everyone": all(tally(picture) == (pairs, 0) for _, picture in shown),
    }
    seen = np.any([picture.numpy() > 0 for _, picture in shown], axis=0)  # (n, n)
    cycle = families(attention, n, seen)
    found["families"] = [blob.add(pack_bits(family.mask().numpy())) for family in cycle]
    grown = hops(cycle, attention.options.causal)
    found["steps"], found["why"] = grown.steps, grown.why(attention.options.causal)
    sets, rows = attention.summaries(n)
    if sets:
        unique = list(dict.fromkeys(map(tuple, rows)))
        which = {row: at for at, row in enumerate(unique)}
        about = [[progressions(members) for members in sets], unique, [which[tuple(row)] for row in rows]]
        found["summaries"] = blob.add_json(about)
    return found


def families(attention: Attention, n: int, seen: np.ndarray) -> tuple[Family, ...]:
    """The sets that layers cycle through; where they depend on the tokens, those of the picture, bool (n, n)."""
    if attention.picture_note:
        return (_family(seen),)
    try:
        return read(attention, n).cycle
    except ValueError:  # a token that sees nobody: the theory refuses it, a picture need not
        return (_family(seen),)


def _family(seen: np.ndarray) -> Family:
    return Family(np.concatenate(([0], seen.sum(1).cumsum())), np.nonzero(seen)[1].astype(np.int32))


def _first_sentence(cls: type[Attention]) -> str:
    """The first paragraph of its docstring, in one line."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())


def _text(value: Any) -> str:
    """A value as a spec writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
