"""Using a trained model: test it again, ask it, let it write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from subquad.models import HEADS
from subquad.tasks import task_class
from subquad.tasks.base import Task
from subquad.training import log
from subquad.training.checkpoints import UNREADABLE


def load(folder: Path, data: Path | None = None) -> tuple[Any, Task]:
    """The model and the task of a run (`OUT` or `OUT/model`)."""
    folder = folder / "model" if (folder / "model" / "task.json").exists() else folder
    if not (folder / "task.json").exists():
        raise FileNotFoundError(f"{folder} holds no model that subquad trained (no task.json, no model/task.json)")
    about = log.read_json(folder / "task.json")
    missing = {"task", "recipe", "settings", "seed"} - set(about)
    if missing:
        raise ValueError(f"{folder / 'task.json'} is damaged: it does not say {sorted(missing)[0]}")
    cls = task_class(about["task"])
    settings = {key: tuple(x) if isinstance(x, list) else x for key, x in about["settings"].items()}
    task = cls(type(cls.recipes[about["recipe"]])(**settings), data, about["seed"])
    try:
        model = HEADS[task.head].from_pretrained(folder)
    except UNREADABLE as error:
        raise ValueError(f"{folder}: the model cannot be read ({' '.join(str(error).split())[:200]})") from error
    task.restore(folder)
    return model.eval(), task


@torch.no_grad()
def evaluate(model: Any, task: Task, part: str = "test", batch: int | None = None) -> dict[str, float]:
    """The task's metrics on a part of its data: train, valid or test."""
    dataset = getattr(task.load(), part)
    size = batch or task.recipe.batch
    set_seed(task.seed)  # sampled attention: repeatable
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
        raise ValueError("--prompt is empty: give the model at least one character to go on from")
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
