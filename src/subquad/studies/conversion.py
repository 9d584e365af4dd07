"""What converting a real pretrained model costs and saves: the page behind docs/conversion.md.

One book gives the losses, of the original and of each conversion; the speed of reading a prompt (prefill) and of
writing a token after it (decode) is measured side by side in one process. Nothing is trained here.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from subquad import hf
from subquad.core.console import err, out
from subquad.core.files import write_atomically
from subquad.core.memory import peak, reset_peak
from subquad.hf import texts
from subquad.hf.caching import cache_bytes
from subquad.hf.loading import load
from subquad.hf.original import original
from subquad.hf.passkey import passkey
from subquad.hf.perplexity import measure

WINDOW = "combiner-window:span=32,window=256,sinks=4"
SPECS = (f"{WINDOW},abstraction=mean", f"{WINDOW},abstraction=attended")


def add_to(app: typer.Typer) -> None:
    app.command("conversion", epilog="Example: subquad study conversion model.gguf --text book.txt --out out/demo")(
        conversion
    )


def conversion(
    model: Annotated[Path, typer.Argument(help="Folder of a transformers language model, or a .gguf file.")],
    text: Annotated[Path, typer.Option(help="A text file; the part behind --start is read.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder for the page and its numbers.")] = Path("out/demo"),
    n: Annotated[int, typer.Option(min=16, help="Tokens of the text.")] = 2048,
    start: Annotated[int, typer.Option(min=0, help="Character at which to begin.")] = 20000,
    speed: Annotated[int, typer.Option(min=16, help="Tokens of the prompt whose speed is measured.")] = 4096,
) -> None:
    """Convert a pretrained model and measure it beside the original: loss, mass on summaries, speed, hidden number."""
    from subquad.training.quiet import quiet

    quiet()
    found, tokenizer = load(model)
    ids = texts.window(texts.read(text), tokenizer, max(n, speed), start)
    rows = losses(found, ids[:, :n])
    hf.convert(found, SPECS[-1])
    err().print("reading and writing …")
    result = {"model": model.name, "n": n, "rows": rows, "speed": speeds(found, ids[:, :speed])}
    result["passkey"] = {
        name: [one._asdict() for one in passkey(found, tokenizer, n, (0.0, 0.5, 0.9, 1.0), full=name == "original")]
        for name in ("original", "converted")
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "conversion.json", json.dumps(result, indent=1) + "\n")
    write_atomically(folder / "conversion.md", page(result))
    out().print(page(result), soft_wrap=True)
    out().print(f"page: {folder / 'conversion.md'}", soft_wrap=True)


def losses(model: Any, ids: Tensor) -> list[dict[str, Any]]:
    """The original and each conversion on the same tokens."""
    rows = []
    for spec in ("full", *SPECS):
        err().print(f"{spec} …")
        if spec != "full":
            hf.convert(model, spec)
        one = measure(model, ids)
        rows.append({"attention": spec, "loss": one.loss(), "second half": one.loss(ids.shape[1] // 2)})
        rows[-1] |= {"mass": one.mass, "by position": one.by_position()}
    return rows


@torch.no_grad()
def speeds(model: Any, ids: Tensor, written: int = 8) -> dict[str, dict[str, float]]:
    """Prefill and decode of the converted model and of the original inside it, one after the other."""
    measured: dict[str, dict[str, float]] = {}
    for name in ("original", "converted"):
        with original(model) if name == "original" else nullcontext():
            before, began = reset_peak(), time.perf_counter()
            output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            prefill, memory = time.perf_counter() - began, peak() - before
            cache, times = output.past_key_values, []
            token = output.logits[:, -1:].argmax(-1)
            for _ in range(written):
                began = time.perf_counter()
                output = model(input_ids=token, past_key_values=cache, use_cache=True)
                times.append(time.perf_counter() - began)
                token = output.logits[:, -1:].argmax(-1)
            measured[name] = {"prefill": prefill, "memory": memory, "decode": median(times)}
            measured[name]["cache"] = cache_bytes(cache)
    return measured


def page(result: dict[str, Any]) -> str:
    """The numbers as Markdown."""
    n, first = result["n"], result["rows"][0]
    lines = [f"## {result['model']}, {n:,} tokens of a book, nothing trained", ""]
    lines += [
        "| attention | loss | above full | second half | above full | mass on summaries |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        mass = "–" if row["mass"] is None else f"{row['mass']:.1%}"
        gaps = [row[key] - first[key] for key in ("loss", "second half")]
        cells = f"{row['loss']:.3f} | {gaps[0]:+.3f} | {row['second half']:.3f} | {gaps[1]:+.3f}"
        lines.append(f"| `{row['attention']}` | {cells} | {mass} |")
    lines += ["", "| | prefill | memory | per token written | cache |", "|---|---|---|---|---|"]
    for name, one in result["speed"].items():
        memory, cache = (f"{one[key] / 2**20:,.0f} MiB" for key in ("memory", "cache"))
        lines.append(f"| {name} | {one['prefill']:.2f} s | {memory} | {one['decode'] * 1e3:.0f} ms | {cache} |")
    lines += [
        "",
        "| hidden number, at depth | " + " | ".join(f"{x['depth']:.0%}" for x in result["passkey"]["original"]),
    ]
    lines[-1] += " |"
    lines.append("|---" * (1 + len(result["passkey"]["original"])) + "|")
    for name, tries in result["passkey"].items():
        cells = " | ".join(f"{'found' if x['found'] else 'no'} ({x['loss']:.2f})" for x in tries)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"
