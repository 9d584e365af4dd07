"""Using a trained model: test it again, ask it, let it write."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import set_seed

from subquad.core.options import make
from subquad.models import HEADS
from subquad.tasks import task_class
from subquad.tasks.base import Task
from subquad.training import checkpoints, log
from subquad.training.callbacks import no_progress_bars
from subquad.training.trainer import evaluation_seed


def load(folder: Path, data: Path | None = None) -> tuple[Any, Task]:
    """The model and the task of a run (`OUT` or `OUT/model`)."""
    folder = folder / "model" if (folder / "model" / "task.json").exists() else folder
    if not (folder / "task.json").exists():
        raise FileNotFoundError(
            f"{folder} does not contain a model that subquad trained (no task.json, no model/task.json)"
        )
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


def predict(model: Any, task: Task, lines: Iterable[str]) -> Iterator[str]:
    """An answer for each line; an empty line has an empty answer, a line that cannot be read is named."""
    for number, line in enumerate(lines, 1):
        try:
            yield task.reply(model, line) if line.strip() else ""
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error


def generate(model: Any, task: Task, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The prompt and what the model writes after it; beyond its length it sees the newest tokens only."""
    if task.head != "causal-lm":
        raise ValueError(f"generate needs a causal language model; {task.name} trains a {task.head} head")
    if not prompt:
        raise ValueError("--prompt is empty: give the model at least one character to continue")
    set_seed(seed)
    ids = task.encode(prompt)["input_ids"][None]  # (1, n)
    longest = model.config.max_position_embeddings
    ends = model.config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(ids[:, -longest:]).logits[:, -1].float()  # (1, V)
            token = (
                logits.argmax(-1, keepdim=True) if temperature == 0 else sample((logits - logits.max()) / temperature)
            )
            ids = torch.cat([ids, token], 1)
            if token.item() in ends:
                break
    return task.decode(ids[0].tolist())


def sample(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(logits.softmax(-1), 1)  # (1, 1)
