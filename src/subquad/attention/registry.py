"""The registry: name → class, one line per mechanism, imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subquad.attention.base import Attention
from subquad.core.names import look_up
from subquad.core.options import make, parse, split_spec

_MECHANISMS: dict[str, str | type[Attention]] = {
    "full": "subquad.attention.full:Full",
    "strided": "subquad.attention.patterns:Strided",
    "fixed": "subquad.attention.patterns:Fixed",
    "star": "subquad.attention.patterns:Star",
    "random": "subquad.attention.patterns:Random",
    "longformer": "subquad.attention.patterns:Longformer",
    "bigbird": "subquad.attention.patterns:BigBird",
    "logsparse": "subquad.attention.patterns:Logsparse",
    "axial": "subquad.attention.patterns:Axial",
    "pattern": "subquad.attention.patterns:Custom",
    "composite-slice": "subquad.attention.composite_slice:CompositeSlice",
    "combiner-fixed": "subquad.attention.combiner_fixed:CombinerFixed",
    "combiner-logsparse": "subquad.attention.combiner_logsparse:CombinerLogsparse",
    "combiner-axial": "subquad.attention.combiner_axial:CombinerAxial",
    "combiner-mixture": "subquad.attention.combiner_mixture:CombinerMixture",
    "combiner-routing": "subquad.attention.combiner_routing:CombinerRouting",
    "combiner-tree": "subquad.attention.combiner_tree:CombinerTree",
    "combiner-plan": "subquad.attention.combiner_plan:CombinerPlan",
    "routing": "subquad.attention.routing:Routing",
    "sbm": "subquad.attention.sbm:Sbm",
}


def available() -> tuple[str, ...]:
    """The names of all registered mechanisms."""
    return tuple(_MECHANISMS)


def register(name: str, *, replace: bool = False) -> Callable[[type[Attention]], type[Attention]]:
    """Class decorator: make a mechanism of your own available under `name` everywhere."""

    def add(cls: type[Attention]) -> type[Attention]:
        if not (isinstance(cls, type) and issubclass(cls, Attention)):
            raise TypeError(f"register({name!r}) takes a subclass of subquad.Attention, not {cls!r}")
        if any(sign in name for sign in ":=,+ ") or not name:
            raise ValueError(f"name must be a word without : = , + or blanks, not {name!r}")
        if name in _MECHANISMS and not replace:
            raise ValueError(f"name {name!r} is taken; pass replace=True to replace it")
        cls.name = name
        _MECHANISMS[name] = cls
        return cls

    return add


def unregister(name: str) -> None:
    """Take a mechanism out again."""
    if name not in _MECHANISMS:
        raise ValueError(f"no mechanism is called {name!r}")
    del _MECHANISMS[name]


def mechanism(name: str) -> type[Attention]:
    """The class registered under `name`."""
    return look_up("attention", name, _MECHANISMS)


def attention(spec: str, **options: Any) -> Attention:
    """An attention mechanism from its name or spec.

        attention("combiner-fixed", num_heads=8, head_dim=64, causal=True, span=64)
        attention("combiner-fixed:span=64,abstraction=mean", num_heads=8, head_dim=64, causal=True)

    An option given in the spec and as a keyword must agree.
    """
    if not isinstance(spec, str):
        raise TypeError(f"spec must be a text such as 'strided:w=16', not {type(spec).__name__}")
    name, texts = split_spec(spec)
    cls = mechanism(name)
    given = parse(cls.Options, name, texts)
    for key, value in options.items():
        if key in given and given[key] != value:
            raise ValueError(f"{name}: {key} is {given[key]!r} in the spec and {value!r} as a keyword")
    return cls(make(cls.Options, name, {**given, **options}))
