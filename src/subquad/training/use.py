"""Using a trained model: test it again, ask it, let it write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import set_seed

from subquad.core.files import model_folder
from subquad.core.options import make
from subquad.core.spoken import argument
from subquad.models import HEADS
from subquad.tasks import task_class
from subquad.tasks.base import Task
from subquad.training import checkpoints, log
from subquad.training.callbacks import no_progress_bars
from subquad.training.trainer import evaluation_seed

UNFINISHED = "\ufffd"  # what decoders show of a character whose last bytes are still to come


def load(folder: Path, data: Path | None = None) -> tuple[Any, Task]:
    """The model and the task of a run (`OUT` or `OUT/model`)."""
    folder = model_folder(folder)
    if (folder / checkpoints.DIGESTS).exists() and (wrong := checkpoints.disagreement(folder)):
        raise ValueError(
            f"{folder} is damaged: {wrong} (if you changed it yourself, delete {folder / checkpoints.DIGESTS})"
        )
    task = read_task(folder, data)
    check_config(folder, task)
    try:
        with no_progress_bars():
            model = HEADS[task.head].from_pretrained(folder)
    except (*checkpoints.UNREADABLE, TypeError) as error:
        raise ValueError(f"{folder}: the model cannot be read ({' '.join(str(error).split())[:200]})") from error
    task.restore(folder)
    return model.eval(), task


def read_task(folder: Path, data: Path | None) -> Task:
    """The task as task.json describes it; what it says is checked before anything is made of it."""
    path = folder / "task.json"
    about = log.read_json(path)
    for key, kind in (("task", str), ("recipe", str), ("settings", dict), ("seed", int)):
        if not isinstance(about.get(key), kind):
            what = f"{key} is {about[key]!r:.40}" if key in about else f"it does not say {key}"
            raise ValueError(f"{path} is damaged: {what}")
    if not 0 <= about["seed"] < 2**32:
        raise ValueError(f"{path} is damaged: seed must be at least 0 and below 2^32, not {about['seed']!r:.40}")
    cls = task_class(about["task"])
    if about["recipe"] not in cls.recipes:
        raise ValueError(f"{path}: recipe must be one of {', '.join(cls.recipes)}, not {about['recipe']!r:.40}")
    try:
        recipe = make(type(cls.recipes[about["recipe"]]), about["task"], about["settings"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return cls(recipe, data, about["seed"])


def check_config(folder: Path, task: Task) -> None:
    """Refuse a configuration that this model cannot have, before memory is taken for it."""
    path, r = folder / "config.json", task.recipe
    if not path.exists():
        raise ValueError(f"{folder}: the model cannot be read (config.json is missing)")
    config = log.read_json(path)
    sizes = {"hidden_size": r.width, "num_hidden_layers": r.layers, "num_attention_heads": r.heads,
             "intermediate_size": r.feedforward, "max_position_embeddings": task.longest}  # fmt: skip
    for key, size in sizes.items():
        if config.get(key) != size:
            raise ValueError(f"{path} is damaged: {key} is {config.get(key)!r:.40}, and task.json says {size}")
    for key, value in config.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path} is damaged: {key} must be a finite number, not {value}")
    for key in ("dropout", "attention_dropout"):
        if not isinstance(config.get(key, 0.0), (int, float)) or not 0 <= config.get(key, 0.0) < 1:
            raise ValueError(f"{path} is damaged: {key} must be at least 0 and below 1, not {config[key]!r:.40}")
    if not isinstance(config.get("layer_norm_eps", 1e-5), float) or config.get("layer_norm_eps", 1e-5) <= 0:
        raise ValueError(
            f"{path} is damaged: layer_norm_eps must be a number > 0, not {config['layer_norm_eps']!r:.40}"
        )
    if (folder / "model.safetensors.index.json").exists():  # several files of weights
        return
    try:
        with safe_open(folder / "model.safetensors", "pt") as weights:
            tensors = len(weights.keys())
    except checkpoints.UNREADABLE as error:
        raise ValueError(f"{folder}: the model cannot be read ({' '.join(str(error).split())[:200]})") from error
    if r.layers > tensors:
        raise ValueError(f"{path} is damaged: {r.layers} layers, and model.safetensors has {tensors} tensors in all")


@torch.no_grad()
def evaluate(model: Any, task: Task, part: str = "test", batch: int | None = None) -> dict[str, float]:
    """The task's metrics on a part of its data: train, valid or test."""
    dataset = getattr(task.load(), part)
    size = batch or task.recipe.batch
    set_seed(evaluation_seed(task.seed, 0))  # sampled attention: as in the test at the end of the run
    loader = torch.utils.data.DataLoader(dataset, size, collate_fn=task.collate)
    statistics = [task.score(model(**inputs).logits, inputs["labels"]) for inputs in loader]
    return {**task.measure(torch.cat(statistics).numpy()), **task.finish(model, dataset)}


def predict(
    model: Any, task: Task, lines: Iterable[str | bytes], report: Callable[[str], Any] | None = None
) -> Iterator[str]:
    """An answer for each line (as text, or as UTF-8).

    A line that cannot be read, such as an empty one, is an error that names it. With `report` the error goes there, its
    answer is empty, and the next line is read.
    """
    for number, line in enumerate(lines, 1):
        try:
            text = line if isinstance(line, str) else utf8(line, first=number == 1)
            if not text.strip():
                raise ValueError("the line is empty")
            answer = task.reply(model, text)
        except ValueError as error:
            if report is None:
                raise ValueError(f"line {number}: {error}") from error
            report(f"line {number}: {error}")
            answer = ""
        yield answer


def utf8(line: bytes, *, first: bool) -> str:
    try:
        return line.decode("utf-8-sig" if first else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason})") from None


def generate(model: Any, task: Task, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The prompt and what the model writes after it."""
    return "".join(write(model, task, prompt, tokens, temperature, seed))


def write(model: Any, task: Task, prompt: str, tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """The prompt, then a piece of text for each token, as it comes. A piece may be empty: a character can take several
    tokens.
    """
    if task.head != "causal-lm":
        raise ValueError(f"generate needs a causal language model; {task.name} trains a {task.head} head")
    if not prompt:
        raise ValueError(f"{argument('prompt')} is empty: give the model at least one character to continue")
    set_seed(seed)
    ids = task.encode(prompt)["input_ids"][None]  # (1, n)
    shown = task.decode(ids[0].tolist())
    yield shown
    text = shown
    for longer in continued(model, ids, tokens, temperature):
        text = task.decode(longer[0].tolist())
        if not text.endswith(UNFINISHED):
            yield text.removeprefix(shown)
            shown = text
        else:
            yield ""
    yield text.removeprefix(shown)


@torch.no_grad()
def continued(model: Any, ids: torch.Tensor, tokens: int, temperature: float) -> Iterator[torch.Tensor]:
    """The tokens (1, n) with one more at a time. Each is read once, from a cache; beyond its length a model sees the
    newest tokens only, and reads them all at every step.
    """
    longest, ends = model.config.max_position_embeddings, model.config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    streams, cache, new = model.encoder.streams() is None, None, ids[:, -longest:]
    for _ in range(tokens):
        if streams and ids.shape[1] <= longest:
            output = model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
        else:
            output = model(ids[:, -longest:], logits_to_keep=1)
        logits = output.logits[:, -1].float()  # (1, V)
        new = logits.argmax(-1, keepdim=True) if temperature == 0 else sample((logits - logits.max()) / temperature)
        ids = torch.cat([ids, new], 1)
        yield ids
        if new.item() in ends:
            break


def sample(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(logits.softmax(-1), 1)  # (1, 1)
