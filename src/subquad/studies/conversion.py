"""What converting a real pretrained model costs and saves: the page behind docs/conversion.md.

Texts give the losses of the original, of a window with sinks alone, of each conversion and of an adapted model; the
speed of reading a prompt (prefill) and of writing a token after it (decode) is measured side by side in one process.
Nothing is trained here. What is in the file of numbers is not measured again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from subquad import hf
from subquad.core.console import err, out
from subquad.core.files import write_atomically
from subquad.core.load import OtherLoad, why_busy
from subquad.core.memory import peak, reset_peak
from subquad.hf import texts
from subquad.hf.caching import cache_bytes
from subquad.hf.loading import load
from subquad.hf.lowrank import original
from subquad.hf.passkey import passkey
from subquad.hf.perplexity import measure
from subquad.studies.conversion_tables import ADAPTED, ALONE, SHOWN

SPAN, NEAR, SINKS = 32, 256, 4
WINDOW = f"combiner-window:span={SPAN},window={NEAR},sinks={SINKS}"
DIRECT = f"longformer:window={2 * (NEAR - 1) + SPAN},global_tokens={SINKS}"  # what WINDOW sees directly on average
BEYOND = NEAR + SPAN  # no token before this place sees a summary
DEPTHS = (0.1, 0.3, 0.5, 0.7)


def show(
    model: Path,
    books: dict[str, str],
    folder: Path,
    specs: list[str],
    adapted: list[Path],
    n: int,
    start: int,
    lengths: list[int],
    hidden: int,
    tries: int,
) -> None:
    """The command `subquad study conversion`."""
    from subquad.training.start import quiet

    quiet()
    found, tokenizer = load(model)
    specs = specs or default_specs(found)
    kept = Measurements(folder / "conversion.json", model.name)
    ids = {name: texts.window(text, tokenizer, n, start) for name, text in books.items()}
    first = next(iter(books.values()))
    for one, label in variants(found, specs, adapted):
        measure_losses(kept, one, label, ids)
        if label == specs[-1] or label.startswith(ADAPTED):
            measure_speeds(kept, one, label, [texts.window(first, tokenizer, length, start) for length in lengths])
        if hidden:
            measure_passkeys(kept, one, label, tokenizer, hidden, tries)
    write_atomically(folder / "conversion.md", page(kept.data))
    out().print(page(kept.data), soft_wrap=True)
    out().print(f"page: {folder / 'conversion.md'}", soft_wrap=True)


def default_specs(model: Any) -> list[str]:
    """Means, attended summaries of every head, and those that the heads of a key share."""
    config = model.config
    shared = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    own = f"{WINDOW},abstraction=attended"
    return [f"{WINDOW},abstraction=mean", own, *([f"{own},shared_heads={shared}"] if shared > 1 else [])]


def variants(model: Any, specs: Sequence[str], adapted: Sequence[Path]) -> Iterator[tuple[Any, str]]:
    """The original, a window with sinks alone, each conversion, and the adapted models."""
    yield hf.revert(model), "full"
    yield hf.convert(model, DIRECT), ALONE
    for spec in specs:
        yield hf.convert(model, spec), spec
    for folder in adapted:
        yield load(folder)[0], f"{ADAPTED}{folder.name}"


class Measurements:
    """Rows of numbers in a file; one that is there is not measured again."""

    def __init__(self, path: Path, model: str) -> None:
        self.path = path
        self.data: dict[str, Any] = {"model": model, **{kind: [] for kind in SHOWN}}
        if path.exists():
            self.data = json.loads(path.read_text())
            if self.data["model"] != model:
                raise ValueError(f"{path} is about {self.data['model']}, not {model}: choose another folder")

    def add(self, kind: str, key: dict[str, Any], get: Callable[[], dict[str, Any]]) -> None:
        if any(all(row.get(name) == value for name, value in key.items()) for row in self.data[kind]):
            return
        err().print(f"{kind}: {', '.join(str(value) for value in key.values())} …", soft_wrap=True)
        self.data[kind].append({**key, **get()})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self.data, indent=1) + "\n")


def measure_losses(kept: Measurements, model: Any, label: str, ids: dict[str, Tensor]) -> None:
    for name, tokens in ids.items():

        def get(tokens: Tensor = tokens) -> dict[str, Any]:
            one = measure(model, tokens)
            losses = {"loss": one.loss(), "beyond": one.loss(min(BEYOND, tokens.shape[1] // 2))}
            return {**losses, "mass": one.mass, "by position": one.by_position()}

        kept.add("losses", {"attention": label, "text": name, "n": tokens.shape[1]}, get)


def measure_speeds(kept: Measurements, model: Any, label: str, prompts: Sequence[Tensor]) -> None:
    for ids in prompts:

        def get(ids: Tensor = ids) -> dict[str, Any]:
            with OtherLoad() as load:
                found = speeds(model, ids)
            return {**found, "busy": load.share}

        kept.add("speeds", {"attention": label, "n": ids.shape[1]}, get)


def measure_passkeys(kept: Measurements, model: Any, label: str, tokenizer: Any, n: int, tries: int) -> None:
    for depth in DEPTHS:
        key = {"attention": label, "n": n, "depth": depth, "tries": tries}
        kept.add("passkeys", key, lambda depth=depth: passkey(model, tokenizer, n, (depth,), tries)[0]._asdict())


@torch.no_grad()
def speeds(model: Any, ids: Tensor, written: int = 8) -> dict[str, dict[str, float]]:
    """Prefill and decode of the converted model and of the original inside it, one after the other."""
    model(input_ids=ids[:, :BEYOND], use_cache=True, logits_to_keep=1)  # loads what is loaded once
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
    titles = {
        "losses": f"Loss beyond token {BEYOND}, nats: full attention, and what the others are above it",
        "speeds": "Converted against original",
        "passkeys": "Hidden numbers that are found, the share of their digits, and the loss of these",
    }
    parts = [f"## {result['model']}"]
    for kind, title in titles.items():
        if result[kind]:
            parts += [f"### {title}", SHOWN[kind](result)]
    why = why_busy(max((row.get("busy") or 0 for row in result["speeds"]), default=0), {})
    if why is not None:
        parts.append(f"The speeds are not reliable: {why}. To measure them again, start with an empty folder.")
    return "\n\n".join(parts) + "\n"
