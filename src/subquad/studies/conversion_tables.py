"""What `subquad study conversion` measured, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import Any

from subquad.studies.tables import markdown

Result = dict[str, Any]
ALONE = "window and sinks alone"
ADAPTED = "adapted: "  # and the name of the folder


def losses(result: Result) -> str:
    """Nats above full attention beyond the window, in each text, and the share of the gap that is closed. In the first
    eighth of a text (256 of 2,048 tokens) the window sees everything: what an adapted model gains there is not the
    attention's, and the last column takes it off.
    """
    rows = result["losses"]
    books, found = _of(rows, "text"), {(row["attention"], row["text"]): row for row in rows}
    lines = []
    for name in _of(rows, "attention"):
        own = [(found.get((name, book)), found[("full", book)]) for book in books]
        cells = [_above(one, full) for one, full in own]
        shares = [_share(closed(found, name, book, rest) for book in books) for rest in (False, True)]
        both = [(one, full) for one, full in own if one is not None]
        cells.append(f"{mean(one['loss'] - full['loss'] for one, full in both):+.3f}")
        cells.append(f"{mean(one['by position'][0] - full['by position'][0] for one, full in both):+.3f}")
        lines.append([_name(name), *cells])
        lines[-1] += ["", ""] if name in ("full", ALONE) else shares
    titles = ["whole text, mean", "first eighth, mean", "gap closed, mean", "… without the gain of the first eighth"]
    return markdown(["attention", *books, *titles], lines)


def _share(known: Iterable[float | None]) -> str:
    shares = [share for share in known if share is not None]
    return f"{mean(shares):.0%}" if shares else ""


def closed(found: dict[tuple[str, str], Result], name: str, book: str, rest: bool = False) -> float | None:
    """The share of the gap between window and sinks alone and full attention that is closed beyond the window; `rest`:
    of what is left of it without the difference in the first eighth.
    """
    one, alone, full = (found.get((each, book)) for each in (name, ALONE, "full"))
    if one is None or alone is None or full is None:
        return None
    gap = alone["beyond"] - full["beyond"]
    early = one["by position"][0] - full["by position"][0] if rest else 0.0
    return (alone["beyond"] - one["beyond"] + early) / gap if gap > 0 else None  # no gap: the window sees everything


def _above(one: Result | None, full: Result) -> str:
    if one is None:
        return "not measured"
    return f"{one['beyond']:.3f}" if one is full else f"{one['beyond'] - full['beyond']:+.3f}"


def speeds(result: Result) -> str:
    """Converted against original, by the length of the prompt; each conversion is named where there are several."""
    names, lines = _of(result["speeds"], "attention"), []
    for row in sorted(result["speeds"], key=lambda row: (names.index(row["attention"]), row["n"])):
        old, new = row["original"], row["converted"]
        faster = [f"{old[key] / new[key]:.2f} ×" for key in ("prefill", "decode")]
        smaller = [f"{new[key] / old[key]:.2f}" if old[key] else "–" for key in ("memory", "cache")]  # 0: too small
        size = f"{new['cache'] / 2**20:,.0f} of {old['cache'] / 2**20:,.0f} MiB"
        lines.append([*([_name(row["attention"])] if len(names) > 1 else []), f"{row['n']:,}", *faster, *smaller, size])
    titles = ["tokens", "prefill", "decode", "memory of the prefill", "cache", "bytes of the cache"]
    return markdown([*(["attention"] if len(names) > 1 else []), *titles], lines)


def passkeys(result: Result) -> str:
    """Which share of the hidden numbers is found, by distance, which share of their digits, and the loss of these."""
    rows = result["passkeys"]
    places = sorted({(row["n"], row["distance"]) for row in rows})
    found = {(row["attention"], row["n"], row["distance"]): row for row in rows}
    lines = []
    for name in _of(rows, "attention"):
        cells = (found.get((name, *place)) for place in places)
        shown = ("" if one is None else f"{one['found']:.0%}{_digits(one)} ({one['loss']:.2f})" for one in cells)
        lines.append([_name(name), *shown])
    return markdown(["number said, tokens back", *(f"{distance:,} of {n:,}" for n, distance in places)], lines)


def _digits(one: Result) -> str:
    return f", {one['digits']:.0%}" if "digits" in one else ""


def _name(attention: str) -> str:
    return f"`{attention}`" if "=" in attention else attention


def _of(rows: Sequence[Result], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


SHOWN: dict[str, Callable[[Result], str]] = {"losses": losses, "speeds": speeds, "passkeys": passkeys}
