"""A page for every registered mechanism, made from what its class declares, and the gallery that leads to them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from docsite.prose import escaped, has_formula, markdown, table
from subquad.attention.base import Attention
from subquad.attention.registry import available, for_length, mechanism
from subquad.core.options import Options, fields, split_spec
from subquad.plots import panels, save_cells, tally
from subquad.reproductions import PAPERS, pages
from subquad.studies.tables import break_even
from subquad.theory import check

SIZE = 64  # tokens of a picture: `gallery` options are chosen for it
THEORY = 256  # tokens of a verdict
LENGTHS = (1024, 4096, 65536)  # at which connections are counted
MOST = 2  # heads drawn, where heads differ
WAYS = ("bidirectional", "causal")
ABLE = {
    "bidirectional": "every token may see later ones",
    "causal": "position i sees positions 0 … i only",
    "cross": "queries and keys of different lengths",
    "padding": "`key_mask`",
    "streaming": "token by token, with a state: `start` and `extend`",
    "weights": "the output is weights × values, and `weights` gives them",
    "stochastic": "random in evaluation too, from a seed",
    "needs_max_length": "`max_length` must be given",
}


def write_all(folder: Path, results: Path, *, size: int = SIZE, theory: int = THEORY) -> list[Path]:
    """`folder`/NAME.md for every mechanism, their pictures, and the gallery, index.md. Returns the pages."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    shown = {name: draw(mechanism(name), folder / "images", size) for name in available()}
    written = []
    for name in available():
        path = folder / f"{name}.md"
        path.write_text(page(name, shown[name], results, size=size, theory=theory), encoding="utf-8")
        written.append(path)
    (folder / "index.md").write_text(gallery(shown), encoding="utf-8")
    return written


def page(name: str, pictures: dict[str, str], results: Path, *, size: int, theory: int) -> str:
    """The Markdown page of one mechanism."""
    cls = mechanism(name)
    parts = [
        f"# {name}",
        f"{cls.family} · {escaped(cls.paper)} · cost {escaped(cls.cost)}",
        use(cls),
        explanation(cls),
        "## Who attends to whom\n\n" + who(cls, pictures, size),
        "## Options\n\n" + options(cls),
        "## What it can do\n\n" + capabilities(cls),
        "## Cost\n\n" + cost(cls),
        "## Measured\n\n" + measured(name, results),
        "## What the theory says\n\n" + verdicts(cls, theory),
        "## In the papers' experiments\n\n" + experiments(name, results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# ---- what it is ---------------------------------------------------------------------------------------------


def explanation(cls: type[Attention]) -> str:
    """Its docstring, where that has no formula its module's, and what it is built on: another mechanism is linked, a
    family without a page of its own is explained here.
    """
    texts, shared = [cls.__doc__ or ""], []
    if not any(has_formula(text) for text in texts):
        texts.append(sys.modules[cls.__module__].__doc__ or "")
    pages = {mechanism(name): name for name in available()}
    for base in cls.__mro__[1 : cls.__mro__.index(Attention)]:
        if base in pages:
            texts.append(f"It is built on `{pages[base]}`.")
            break
        shared.append(sys.modules[base.__module__].__doc__ or "")
    texts += [doc for doc in dict.fromkeys(shared) if has_formula(doc) and doc not in texts]
    return "\n\n".join(markdown(text) for text in texts)


def use(cls: type[Attention]) -> str:
    able = cls.capabilities
    more = (", causal=True" if able.causal else "") + (", max_length=4096" if able.needs_max_length else "")
    if needs_object(cls):
        name = next(field.name for field in fields(cls.Options) if field.type is Any)
        more += f", {name}={name}"
    if able.level == "layer":
        call = f'layer = subquad.MultiheadAttention(512, 8, attention="{cls.name}"{more}, batch_first=True)'
        return f"```python\n{call}\ny, _ = layer(x, x, x, need_weights=False)    # x (B, n, 512)\n```"
    call = f'a = subquad.attention("{cls.name}", num_heads=8, head_dim=64{more})'
    return f"```python\n{call}\ny = a(q, k, v)    # (B, H, n, d) → (B, H, n, d)\n```"


def needs_object(cls: type[Attention]) -> bool:
    """Does it take something that cannot be written in a spec, such as sets of one's own?"""
    return any(field.type is Any for field in fields(cls.Options))


# ---- the picture --------------------------------------------------------------------------------------------


def draw(cls: type[Attention], folder: Path, size: int) -> dict[str, str]:
    """File → caption, a picture for each direction and each of the first heads that differ."""
    found = {}
    for way in directions(cls):
        one = for_length(cls.name, size, causal=way == "causal", **cls.gallery)
        for index, (heads, picture) in enumerate(panels(one.picture(size))[:MOST]):
            file = f"{cls.name}-{way}{f'-{index}' if index else ''}.png"
            save_cells(picture, folder / file)
            direct, summary = tally(picture)
            counts = f"{direct:,} pairs directly" + (f", {summary:,} through summaries" if summary else "")
            found[file] = f"{way}{f', {heads}' if heads else ''}: {counts}"
    return found


def directions(cls: type[Attention]) -> list[str]:
    return [way for way in WAYS if getattr(cls.capabilities, way)]


def who(cls: type[Attention], pictures: dict[str, str], size: int) -> str:
    given = ", ".join(f"`{key}={getattr(value, '__name__', value)}`" for key, value in cls.gallery.items())
    chosen = f" with {given}" if given else ""
    missing = [f"It has no {way} form." for way in WAYS if way not in directions(cls)]
    lines = [f"- ![{cls.name}, {caption}](images/{file})\n\n  {caption}" for file, caption in pictures.items()]
    legend = "Rows are queries, columns are keys. Blue is attended directly, orange through a summary, grey not at all."
    text = " ".join(filter(None, [f"{size} tokens{chosen}.", legend, cls.picture_note, *missing]))
    return f"{text}\n\n:::{{container}} pictures\n" + "\n".join(lines) + "\n:::"


# ---- options, capabilities, cost ----------------------------------------------------------------------------


def options(cls: type[Attention]) -> str:
    shared = {field.name for field in fields(Options)}
    own = [field for field in fields(cls.Options) if field.name not in shared]
    common = [field for field in fields(cls.Options) if field.name in shared]
    titles = ("option", "default", "allowed", "meaning")
    parts = [table(titles, map(_option, own))] if own else ["It has no options of its own."]
    return "\n\n".join([*parts, "Every mechanism takes these:", table(titles, map(_option, common))])


def _option(field: Any) -> list[str]:
    default = "+".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
    default = default.lower() if isinstance(field.default, bool) else default
    return [f"`{field.name}`", f"`{default}`", escaped(field.allowed()), escaped(field.help)]


def capabilities(cls: type[Attention]) -> str:
    rows = [(word.replace("_", " "), "✓" if getattr(cls.capabilities, word) else "–", ABLE[word]) for word in ABLE]
    on_heads = cls.capabilities.level == "head"
    made_by = "`subquad.attention`" if on_heads else "`subquad.MultiheadAttention`, which has the projections it needs"
    rows.append(("works on", "q, k, v" if on_heads else "tokens", made_by))
    divided = "✓" if cls.boundary else "–"
    rows.append(("several processes", divided, escaped(cls.boundary) or "a sequence cannot be divided"))
    text = table(("", "", "what it means"), rows)
    if cls.exceptions:
        kept = [f"- `{check}`: {escaped(reason)}" for check, reason in cls.exceptions.items()]
        text += "\n\nChecks of the contract that it declares it cannot pass:\n\n" + "\n".join(kept)
    return text


def cost(cls: type[Attention]) -> str:
    text = f"In general {escaped(cls.cost)}."
    one = made(cls, LENGTHS[0])
    if one is None:
        return text + " How much that is depends on what you give it."
    text += f" With default options it grows like n^{one.exponent:.3g}, up to logarithms."
    rows = []
    for n in LENGTHS:
        at = made(cls, n)
        known = at is not None and (at.countable is None or n <= at.countable)
        scores = f"{at.connections(n):,.0f}" if known else "–"
        kept = f"{at.kept_keys(n):,.0f}" if cls.capabilities.streaming and cls.capabilities.causal else "–"
        rows.append((f"{n:,}", scores, f"{n * n:,}", kept))
    return (
        text + "\n\n" + table(("n", "scores of a head", "of full attention", "keys a stream keeps"), rows, numbers=True)
    )


@lru_cache(maxsize=512)
def made(cls: type[Attention], n: int) -> Attention | None:
    """It with default options for n tokens; None where it needs something of the user's own."""
    return None if needs_object(cls) else for_length(cls.name, n)


# ---- what is known about it ---------------------------------------------------------------------------------


def read(results: Path, file: str) -> list[dict[str, Any]]:
    return json.loads((results / file).read_text())["rows"] if (results / file).exists() else []


def measured(name: str, results: Path) -> str:
    own = [row for row in read(results, "speed.json") if row["spec"] == name]
    parts = []
    for way in WAYS:
        chosen = [row for row in own if row["causal"] == (way == "causal") and not row["busy"]]
        rows = _speed_rows(chosen)
        if rows:
            parts.append(f"Times faster than full attention, {way}:\n\n" + rows)
            parts += pays(break_even([row for row in own if row["backward"]], way == "causal"))
    parts += list(_peers(name, results))
    if not parts:
        return "No figure of a quiet machine has been committed yet. `subquad bench` measures on yours."
    return "\n\n".join([*parts, "How it was measured: [speed and memory](../performance.md)."])


def pays(even: str) -> list[str]:
    """From which length on it is worth while, in words."""
    if not even:
        return []
    if even.startswith("<"):
        return ["Forward and backward together are faster than full attention at every length measured."]
    if even.startswith(">"):
        return ["Forward and backward together are slower than full attention up to the longest length measured."]
    return [f"Forward and backward together are faster than full attention from about {even} tokens on."]


def _speed_rows(rows: list[dict[str, Any]]) -> str:
    sizes = sorted({row["n"] for row in rows})
    at = {(row["backward"], row["n"]): f"{1 / row['ratio']:.2g}" for row in rows}
    kinds = [(False, "forward"), (True, "forward + backward")]
    lines = [(title, *(at.get((kind, n), "") for n in sizes)) for kind, title in kinds if any(k == kind for k, _ in at)]
    return table(("tokens", *(f"{n:,}" for n in sizes)), lines, numbers=True) if lines else ""


def _peers(name: str, results: Path) -> Iterator[str]:
    rows = [row for row in read(results, "peers.json") if split_spec(row["spec"])[0] == name]
    if rows:
        titles = ("package", "tokens", "direction", "pass", "our time / theirs")
        lines = [
            (f"{row['package']} {row['version']}", f"{row['n']:,}", WAYS[row["causal"]],
             "forward + backward" if row["backward"] else "forward", f"{row['ratio']:.2f}")
            for row in rows
        ]  # fmt: skip
        yield "Beside other implementations, on the same machine in the same run:\n\n" + table(titles, lines)


def verdicts(cls: type[Attention], n: int) -> str:
    """Of Yun et al. and of the Combiner paper, in every direction it has."""
    if needs_object(cls):
        return "It depends on what you give it: `subquad.theory.check` takes it, and says so."
    words = {"yes": "a universal approximator", "no": "not covered"}
    parts = []
    for way in directions(cls):
        verdict = check(cls.name, n, causal=way == "causal")
        said = "refuted" if verdict.refuted else words.get(verdict.answer, verdict.answer)
        marks = {True: "  - ", False: "- "}  # reasons of a reason are indented
        reasons = "\n".join(f"{marks[each.startswith('  ')]}{escaped(each.strip())}" for each in verdict.reasons)
        parts.append(f"**{way.capitalize()}, n = {n}, default options: {said}.**\n\n{reasons}")
    return "\n\n".join([*parts, "What the conditions mean: [theory](../theory.md)."])


def experiments(name: str, results: Path) -> str:
    found = pages.read_results(results) if results.exists() else {}
    rows = [
        (
            paper,
            each.place.split(", ", 1)[1],
            escaped(each.title),
            pages.command(each),
            escaped(pages.standing(each, found)),
        )
        for paper, all_of in PAPERS.items()
        for each in all_of
        if any(
            split_spec(one)[0] == name
            for method in each.methods
            for one in (method.spec + "|" + method.full).split("|")
        )
    ]
    if not rows:
        return "No table of the four papers has it. It can be compared on any task: [training](../training.md)."
    return table(("paper", "place", "what", "command", "here"), rows)


# ---- the gallery --------------------------------------------------------------------------------------------


def gallery(shown: dict[str, dict[str, str]]) -> str:
    """Thumbnails by family, each a link, and the toctree of all pages."""
    families: dict[str, list[str]] = {}
    for name in shown:
        families.setdefault(mechanism(name).family, []).append(name)
    parts = [
        "# Gallery",
        "Who attends to whom in every mechanism, at 64 tokens. Rows are queries, columns are keys; blue is attended "
        "directly, orange through a summary, grey not at all. Choose a picture to see the formula, the options, the "
        "cost and what was measured.",
    ]
    for family, names in families.items():
        parts.append(f"## {family.capitalize()}\n\n{thumbnails(names, shown)}")
    toctree = "\n".join(shown)
    return "\n\n".join(parts) + f"\n\n```{{toctree}}\n:hidden:\n\n{toctree}\n```\n"


def thumbnails(names: list[str], shown: dict[str, dict[str, str]], folder: str = "") -> str:
    lines = [
        f"- [![{name}]({folder}images/{next(iter(shown[name]))})]({folder}{name}.md)\n\n  [{name}]({folder}{name}.md)"
        for name in names
    ]
    return ":::{container} gallery\n" + "\n".join(lines) + "\n:::"
