"""Options: one frozen dataclass per mechanism, checked when it is made, written as text in a spec.

combiner-fixed:span=64,abstraction=mean       name, then option=value; a list is written a+b
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

from subquad.core.names import nearest
from subquad.core.spoken import argument


def option(default: Any = None, help: str = "", *, ge=None, gt=None, le=None, lt=None) -> Any:
    """A dataclass field with a one-line meaning and, for numbers, a range."""
    limits = {name: limit for name, limit in (("≥", ge), (">", gt), ("≤", le), ("<", lt)) if limit is not None}
    return dataclasses.field(default=default, metadata={"help": help, "limits": limits})


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A frozen set of options; a wrong type or an impossible value is an error when it is made."""

    def __post_init__(self) -> None:
        for field in fields(type(self)):
            _check(field, getattr(self, field.name))


@dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """What every mechanism takes."""

    num_heads: int = option(8, "number of heads H", ge=1)
    head_dim: int = option(64, "width d of a head", ge=1)
    causal: bool = option(False, "position i sees positions 0..i only")
    max_length: int | None = option(None, "longest sequence; None = any", ge=1)
    scale: float | None = option(None, "factor on q·k; None = 1/√d", gt=0)
    dropout: float = option(0.0, "dropout on the weights, in training", ge=0, lt=1)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class Field:
    """One option as people see it."""

    name: str
    type: Any
    default: Any
    help: str
    limits: dict[str, float]

    def allowed(self) -> str:
        return describe(self.type, self.limits)


def fields(options: type[Checked]) -> list[Field]:
    """The fields with their types resolved, in order of declaration."""
    return list(_fields(options))  # type: ignore[arg-type]  # a class is hashable, whatever its instances are


@lru_cache(maxsize=256)  # resolving types takes milliseconds, and every mechanism that is made asks
def _fields(options: type[Checked]) -> tuple[Field, ...]:
    types_ = typing.get_type_hints(options)
    return tuple(
        Field(f.name, types_[f.name], f.default, f.metadata.get("help", ""), f.metadata.get("limits", {}))
        for f in dataclasses.fields(options)
    )


def describe(kind: Any, limits: dict[str, float]) -> str:
    """A type and its range in words: «an integer ≥ 1 or None»."""
    words = []
    for member in _members(kind):
        if get_origin(member) is Literal:
            words.append("one of " + ", ".join(str(choice) for choice in get_args(member)))
        elif get_origin(member) is tuple:
            words.append("a list of " + describe(get_args(member)[0], {}).removeprefix("one of "))
        elif member in (int, float):
            bounds = " and ".join(f"{sign} {limit}" for sign, limit in limits.items())
            words.append(("an integer" if member is int else "a number") + (f" {bounds}" if bounds else ""))
        else:
            words.append({bool: "true or false", type(None): "None", str: "a text"}.get(member, "an object"))
    return " or ".join(words)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _check(field: Field, value: Any) -> None:
    if not any(_fits(member, value) for member in _members(field.type)):
        wrong = ValueError if get_origin(_members(field.type)[0]) is Literal else TypeError
        raise wrong(f"{field.name} must be {field.allowed()}, not {value!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    tests = {"≥": lambda x, y: x >= y, ">": lambda x, y: x > y, "≤": lambda x, y: x <= y, "<": lambda x, y: x < y}
    if not math.isfinite(value) or not all(tests[sign](value, limit) for sign, limit in field.limits.items()):
        raise ValueError(f"{field.name} must be {field.allowed()}, not {value!r}")


def _fits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(get_args(kind)[0], item) for item in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)


def make(options: type[Checked], name: str, given: dict[str, Any]) -> Any:
    """The options of mechanism `name`; an unknown one is an error that names the valid ones."""
    known = {field.name: field for field in fields(options)}
    for key in given:
        if key not in known:
            near = nearest(key, known)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{name} has no option {key!r}{hint} (its options: {', '.join(known)})")
    tuples: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        return options(**tuples)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


# ---- text specs ---------------------------------------------------------------------------------------------


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """`name:a=1,b=x+y` → ("name", {"a": "1", "b": "x+y"})."""
    name, _, rest = spec.partition(":")
    given: dict[str, str] = {}
    for item in (piece.strip() for piece in rest.split(",") if rest):
        if not item:
            raise ValueError(f"spec {spec!r} has an empty option: give option=value, comma-separated")
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not key or not value:
            raise ValueError(f"spec {spec!r}: {item!r} is not of the form option=value")
        if key in given:
            raise ValueError(f"spec {spec!r}: option {key} is given twice")
        given[key] = value
    return name.strip(), given


def split_list(text: str) -> list[str]:
    """`full,combiner-fixed:span=64,abstraction=mean,sbm` → three specs: option=value belongs to the spec before it."""
    specs: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if specs and "=" in piece and ":" not in piece:
            specs[-1] += f",{piece}"
        else:
            specs.append(piece)
    doubles = [spec for spec in specs if specs.count(spec) > 1]
    if not all(specs) or doubles:
        wrong = f"names {doubles[0]} twice" if all(specs) else f"{text!r} has an empty entry"
        raise ValueError(f"{argument('attention')} {wrong}: give comma-separated specs")
    return specs


def parse(options: type[Checked], name: str, given: dict[str, str]) -> dict[str, Any]:
    """Texts of a spec turned into values of the declared types; unknown names are left for `make` to refuse."""
    known = {field.name: field for field in fields(options)}
    return {key: _parse(known[key], name, text) if key in known else text for key, text in given.items()}


def _parse(field: Field, name: str, text: str) -> Any:
    for member in _members(field.type):
        if member is type(None) and text.lower() == "none":
            return None
        if member is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if get_origin(member) is tuple:
            return tuple(text.split("+"))
        if get_origin(member) is Literal:
            match = [choice for choice in get_args(member) if str(choice) == text]
            if match:
                return match[0]
        if member in (int, float):
            try:
                return member(text)
            except ValueError:
                continue
        if member is str:
            return text
    raise ValueError(f"{name}: {field.name} must be {field.allowed()}, not {text!r}")
