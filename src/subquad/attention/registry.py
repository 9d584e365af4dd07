"""The registry: name → class, one line per mechanism, imported when it is first asked for.

Importing this module does not import torch: `subquad list` and wrong names are answered at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from subquad.core.declarations import declared, options_class
from subquad.core.names import look_up, unknown
from subquad.core.options import make, parse, split_spec

if TYPE_CHECKING:
    from subquad.attention.base import Attention

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
    "combiner-fixed": "subquad.attention.combiner_plans:CombinerFixed",
    "combiner-window": "subquad.attention.combiner_plans:CombinerWindow",
    "combiner-logsparse": "subquad.attention.combiner_plans:CombinerLogsparse",
    "combiner-axial": "subquad.attention.combiner_plans:CombinerAxial",
    "combiner-mixture": "subquad.attention.combiner_mixture:CombinerMixture",
    "combiner-routing": "subquad.attention.combiner_routing:CombinerRouting",
    "combiner-tree": "subquad.attention.combiner_plans:CombinerTree",
    "combiner-plan": "subquad.attention.combiner_plans:CombinerPlan",
    "routing": "subquad.attention.routing:Routing",
    "sbm": "subquad.attention.sbm:Sbm",
    "linear": "subquad.attention.linear:Linear",
    "performer": "subquad.attention.performer:Performer",
    "cosformer": "subquad.attention.cosformer:Cosformer",
    "local": "subquad.attention.patterns:Local",
    "linformer": "subquad.attention.linformer:Linformer",
    "nystrom": "subquad.attention.nystrom:Nystrom",
    "synthesizer": "subquad.attention.synthesizer:Synthesizer",
    "luna": "subquad.attention.luna:Luna",
    "fnet": "subquad.attention.fnet:FNet",
    "fmmformer": "subquad.attention.fmmformer:FMMformer",
    "sinkhorn": "subquad.attention.sinkhorn:Sinkhorn",
    "h-transformer-1d": "subquad.attention.h_transformer:HTransformer",
    "long-short": "subquad.attention.long_short:LongShort",
    "moba": "subquad.attention.moba:MoBA",
    "reformer": "subquad.attention.reformer:Reformer",
    "scatterbrain": "subquad.attention.scatterbrain:Scatterbrain",
    "nsa": "subquad.attention.nsa:NSA",
    "hca": "subquad.attention.hca:HCA",
    "csa": "subquad.attention.csa:CSA",
}


def available() -> tuple[str, ...]:
    """The names of all registered mechanisms."""
    return tuple(_MECHANISMS)


def register(name: str, *, replace: bool = False) -> Callable[[type[Attention]], type[Attention]]:
    """Class decorator: make a mechanism of your own available under `name` everywhere."""

    from subquad.attention.base import Attention

    if not isinstance(name, str):
        raise TypeError(f'register takes the name of the mechanism, @subquad.register("my-mechanism"), not {name!r}')

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


def entry_of(name: str) -> Any:
    """The class registered under `name`, or "module:Class" of one that is not imported yet."""
    if name not in _MECHANISMS:
        raise unknown("attention", name, _MECHANISMS)
    return _MECHANISMS[name]


def check_name(spec: str, *, used: bool = True) -> None:
    """Refuse a spec, or several with | between, of a mechanism that does not exist or that does not have these options.

    Imports nothing: options are checked as far as the source text of the class tells them. What only Python can give
    is missing in a spec that is to be used.
    """
    for one in spec.split("|"):
        name, texts = split_spec(one)
        entry = entry_of(name)
        only = declared(entry, ("python_only",))["python_only"]
        if only and used:
            raise ValueError(
                f"{name}: {only} is needed, which only Python can give: subquad.attention({name!r}, {only}=…)"
            )
        options = options_class(entry, "Options") if texts and isinstance(entry, str) else None
        if options is not None:
            make(options, name, parse(options, name, texts))


def check_direction(spec: str, causal: bool | None) -> None:
    """Refuse a direction that a mechanism does not have or that its spec contradicts, without importing it; None is
    the direction of the spec.
    """
    for one in spec.split("|"):
        name, texts = split_spec(one)
        said = {"true": True, "false": False}.get(texts.get("causal", "").lower())
        if causal is not None and said not in (None, causal):
            raise contradiction(name, "causal", said, causal)
        wanted = said if causal is None else causal
        if wanted is not None and not describe(name)["causal" if wanted else "bidirectional"]:
            raise no_such_direction(name, causal=wanted)


def no_such_direction(name: str, *, causal: bool) -> ValueError:
    only = "bidirectional" if causal else "causal"
    return ValueError(f"{name}: causal={causal} is not supported; it is {only} only")


def contradiction(name: str, key: str, said: Any, given: Any) -> ValueError:
    return ValueError(f"{name}: {key} is {said!r} in the spec and {given!r} as a keyword")


def describe(name: str) -> dict[str, Any]:
    """What `subquad list` shows of a mechanism: name, family, directions, level, cost, paper.

    Read from the source text of its class, so that torch need not be imported.
    """
    found = declared(_MECHANISMS[name], ("family", "capabilities", "cost", "paper"))
    able = found["capabilities"]
    return {
        "name": name,
        "family": found["family"],
        "causal": able["causal"],
        "bidirectional": able["bidirectional"],
        "level": able["level"],
        "cost": found["cost"],
        "paper": found["paper"],
    }


def attention(spec: str, **options: Any) -> Attention:
    """An attention mechanism from its name or spec.

        attention("combiner-fixed", num_heads=8, head_dim=64, causal=True, span=64)
        attention("combiner-fixed:span=64,abstraction=mean", num_heads=8, head_dim=64, causal=True)

    num_heads=8 and head_dim=64 are the defaults: give those of your queries. `subquad.attention(…).options` lists all
    options with their values. An option given in the spec and as a keyword must agree.
    """
    if not isinstance(spec, str):
        raise TypeError(f"spec must be a text such as 'strided:w=16', not {type(spec).__name__}")
    name, texts = split_spec(spec)
    cls = mechanism(name)
    given = parse(cls.Options, name, texts)
    for key, value in options.items():
        if key in given and given[key] != value:
            raise contradiction(name, key, given[key], value)
    return cls(make(cls.Options, name, {**given, **options}))


def for_length(spec: str, n: int, *, causal: bool | None = None, **options: Any) -> Attention:
    """The mechanism of a spec for sequences of length n: `max_length` where it needs one and, where neither
    the spec nor the caller says `causal`, bidirectional if it can.
    """
    name, texts = split_spec(spec)
    able = mechanism(name).capabilities
    if able.needs_max_length and "max_length" not in texts:
        options["max_length"] = n
    if causal is None and "causal" not in texts:
        causal = not able.bidirectional
    return attention(spec, **options) if causal is None else attention(spec, causal=causal, **options)
