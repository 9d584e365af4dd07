"""The reference of every public name, from signatures and docstrings. Docstrings are Markdown in all but name."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from docsite.prose import escaped, markdown, table

MODULES = (
    "subquad",
    "subquad.models",
    "subquad.hf",
    "subquad.training",
    "subquad.distributed",
    "subquad.testing",
    "subquad.theory",
)
LONG = 12  # parameters beyond which a class shows the fields of its own instead


def page(name: str) -> str:
    """The page of one module: its docstring, and every name of its `__all__`."""
    module = import_module(name)
    parts = [f"# {name}", markdown(module.__doc__ or ""), f"```{{py:module}} {name}\n```"]
    parts += [entry(name, each, getattr(module, each)) for each in module.__all__]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    lines = "\n".join(f"| [`{name}`]({name}.md) | {escaped(first_sentence(import_module(name)))} |" for name in MODULES)
    toctree = "\n".join(MODULES)
    about = (
        "Every public name with its signature and its shapes. B is the batch, H the number of heads, n and m the "
        "lengths of queries and keys, d the width of a head, E that of a token."
    )
    body = f"| module | what it is |\n| --- | --- |\n{lines}"
    return f"# API reference\n\n{about}\n\n{body}\n\n```{{toctree}}\n:hidden:\n\n{toctree}\n```\n"


def first_sentence(thing: Any) -> str:
    return re.split(r"(?<=[.]) ", " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()))[0]


def entry(module: str, name: str, thing: Any) -> str:
    """A heading, so that the page has a table of contents, and the description."""
    if inspect.isclass(thing):
        body = class_entry(module, name, thing)
    elif callable(thing):
        body = directive("py:function", f"{module}.{name}{signature(thing)}", doc(thing), 4)
    else:
        body = directive("py:data", f"{module}.{name}", mapping(thing), 4)
    return f"## {name}\n\n{body}"


def directive(kind: str, title: str, body: str, colons: int) -> str:
    fence = ":" * colons
    return f"{fence}{{{kind}}} {title}\n\n{body}\n{fence}"


def doc(thing: Any) -> str:
    return markdown(inspect.getdoc(thing) or "")


def signature(thing: Any, *, method: bool = False) -> str:
    """(a, b=1): annotations as they are written in the source."""
    try:
        found = inspect.signature(thing)
    except ValueError:  # an exception of plain Python
        return "()"
    params = list(found.parameters.values())[1 if method else 0 :]
    plain = [each.replace(annotation=_annotation(each.annotation)) for each in params]
    result = _annotation(found.return_annotation)
    result = inspect.Signature.empty if result in ("None", inspect.Signature.empty) else result
    text = str(inspect.Signature(plain, return_annotation=result))
    return text.replace("'", "").replace("<factory>", "...")


def _annotation(kind: Any) -> Any:
    if kind is inspect.Parameter.empty or isinstance(kind, str):
        return kind
    return getattr(kind, "__forward_arg__", None) or getattr(kind, "__name__", str(kind))


# ---- classes ------------------------------------------------------------------------------------------------


def class_entry(module: str, name: str, cls: type) -> str:
    parts = [doc(cls)] if _is_ours(cls.__doc__, cls) else []
    own = list(attributes(cls))
    if own:
        rows = [
            (f"`{field}`", f"`{kind}`", f"`{default}`" if default else "", escaped(why))
            for field, kind, default, why in own
        ]
        parts.append(table(("field", "type", "default", "meaning"), rows))
    parts += [
        directive("py:method", f"{each}{signature(method, method=True)}", doc(method), 4)
        for each, method in methods(cls)
    ]
    count = 0 if signature(cls) == "()" else len(inspect.signature(cls).parameters)
    shown = "" if count > LONG or issubclass(cls, BaseException) else signature(cls)
    return directive("py:class", f"{module}.{name}{shown}", "\n\n".join(parts), 6)


def _is_ours(text: str | None, cls: type) -> bool:
    """NamedTuple and dataclass write a docstring of their own where there is none."""
    return bool(text) and not str(text).startswith(f"{cls.__name__}(")


def attributes(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """Annotated attributes of the class body: name, type, default, and the comment behind them."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.split("\n")
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if (
            not isinstance(node, ast.AnnAssign)
            or not isinstance(node.target, ast.Name)
            or node.target.id.startswith("_")
        ):
            continue
        behind = lines[(node.end_lineno or 1) - 1][
            node.end_col_offset :
        ]  # offsets count bytes; lines with more are rare
        comment = behind.partition("#")[2].strip()
        kind = (
            ast.unparse(node.annotation)
            .removeprefix("ClassVar[")
            .removesuffix("]" * ("ClassVar[" in ast.unparse(node.annotation)))
        )
        default, why = _default(node.value)
        yield node.target.id, kind, default, comment or why


def _default(value: ast.expr | None) -> tuple[str, str]:
    """The default and the meaning, also of `option(64, "tokens of a block", ge=1)`."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "option":
        words = [ast.literal_eval(each) for each in value.args]
        limits = ", ".join(f"{word.arg} {ast.unparse(word.value)}" for word in value.keywords)
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        for word, sign in signs.items():
            limits = limits.replace(f"{word} ", f"{sign} ")
        return repr(words[0]), words[1] + (f" ({limits})" if limits else "")
    text = "" if value is None else ast.unparse(value)
    return (text if len(text) <= 40 and "field(" not in text else ""), ""


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods that are written in this library and explained, in the order of the source. What only fulfils a
    contract of transformers is left out.
    """
    seen: set[str] = set()
    others = {name for base in cls.__mro__ if not base.__module__.startswith("subquad") for name in vars(base)}
    for base in cls.__mro__:
        if not base.__module__.startswith("subquad"):
            continue
        for name, member in vars(base).items():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if name.startswith("_") or name in seen or not inspect.isfunction(function) or not function.__doc__:
                continue
            seen.add(name)
            if not isinstance(member, property) and (name == "forward" or name not in others):
                yield name, function


def mapping(thing: dict[str, Any]) -> str:
    """A table of a dictionary: what each entry is."""
    rows = [(f"`{key}`", escaped(first_sentence(value)) or f"`{value.__name__}`") for key, value in thing.items()]
    return table(("name", "what it is"), rows)
