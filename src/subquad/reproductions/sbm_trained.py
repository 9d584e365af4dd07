"""The figures of trained SBM-Transformers: 5, 7 and 8 of Cho et al. 2022, drawn from the runs of its tables 1 and 2."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import set_seed

from subquad.reproductions.declare import AVERAGE, Reproduction, limited
from subquad.reproductions.sbm import SBM, TABLE_1, TABLE_2, WEIGHTS
from subquad.studies import sbm_pictures
from subquad.tasks.base import Task
from subquad.training import log
from subquad.training.rates import choose
from subquad.training.trainer import evaluation_seed
from subquad.training.use import load

PLAIN, SPARSE = "without the density loss", "with the density loss"
SHOWN = {"Pathfinder": ("figure 7", "1e-4"), "Image": ("figure 8", "1e-2")}  # with the λ of the paper's models


class Trained(NamedTuple):
    """A finished run, and which row of a table it belongs to."""

    method: str
    run: Path


def trained_runs(plan: Any, table: Reproduction, methods: Sequence[str]) -> dict[str, Trained]:
    """By task of the Arena: of all finished runs of these methods the one that is best on validation. Whatever learning
    rates they were trained with, as the figure need not know with which options the table was run.
    """
    part = limited(table, methods, AVERAGE.mean_of)
    found: dict[str, dict[str, tuple[Trained, dict[str, Any]]]] = {}
    for column, those, comparison in replace(plan, reproduction=part, earlier={}).comparisons():
        for method in those:
            plain = comparison.folder(method.spec_at(plan.scale), 0)
            for run in (*sorted(plain.parent.glob("rate=*/seed0")), plain):
                result = log.read_result(run)
                if result is not None:
                    found.setdefault(column.name, {})[str(run)] = Trained(method.name, run), result
    best = {name: choose({run: result for run, (_, result) in runs.items()}) for name, runs in found.items()}
    return {name: found[name][run][0] for name, run in best.items() if run is not None}


def plain_runs(plan: Any) -> dict[str, Trained]:
    """Those without the density loss, which both tables have."""
    return trained_runs(plan, TABLE_2, ["λ = 0"]) | trained_runs(plan, TABLE_1, [SBM])


def sparse_runs(plan: Any) -> dict[str, Trained]:
    """Those with the density loss, of the weights that are trained the best one."""
    return trained_runs(plan, TABLE_2, [f"λ = {x}" for x in WEIGHTS if float(x)])


def advice(plan: Any, table: str, method: str, column: str = "") -> str:
    """The command that trains what is missing."""
    words = ["subquad", "reproduce", table, "--method", method, *(["--column", column] if column else [])]
    return f"`{shlex.join([*words, *(['--recipe', 'paper'] if plan.scale == 'paper' else [])])}`"


# ---- figure 5 -------------------------------------------------------------------------------------------------


def test_batches(run: Path, plan: Any, count: int) -> tuple[Any, list[tuple]]:
    """The model of a run, and so many test examples, each a batch of its own."""
    model, task = load(run, plan.data)
    examples: Any = task.load().test
    batches = [task.collate([examples[i]]) for i in range(min(count, len(examples)))]
    keys = ("input_ids", "attention_mask", "pair_ids", "pair_mask") if task.head == "pair" else ("input_ids",)
    set_seed(evaluation_seed(task.seed, 0))  # the graphs are sampled: as in the test at the end of the run
    return model, [tuple(batch.get(key) for key in keys) for batch in batches]


def draw_layers(path: Path, plan: Any) -> None:
    """Figure 5: the density of each layer, without and with the density loss."""
    kinds = {PLAIN: plain_runs(plan), SPARSE: sparse_runs(plan)}
    if not any(kinds.values()):
        raise FileNotFoundError(f"{plan.out} has no finished run of {SBM}: run {advice(plan, TABLE_1.key, SBM)} first")
    models: dict[str, dict[str, Tensor | None]] = {}
    for name in AVERAGE.mean_of:
        runs = {kind: runs.get(name) for kind, runs in kinds.items()}
        sparse = runs[SPARSE]
        if any(runs.values()):
            models[name if sparse is None else f"{name}, {sparse.method}"] = {
                kind: None if each is None else sbm_pictures.densities(*test_batches(each.run, plan, 32))
                for kind, each in runs.items()
            }
    sbm_pictures.draw_densities(models, path, missing(kinds))


def missing(kinds: dict[str, dict[str, Trained]]) -> str:
    """Which models of the paper's figure have not been trained, in words."""
    gone = {kind: [name for name in AVERAGE.mean_of if name not in runs] for kind, runs in kinds.items()}
    words = [f"{', '.join(names)} {kind}" for kind, names in gone.items() if names]
    return f"not trained: {'; '.join(words)}" if words else ""


# ---- figures 7 and 8 ------------------------------------------------------------------------------------------


def chosen(plan: Any, column: str) -> tuple[Trained, str]:
    """The model to show, and in words how it was trained."""
    sparse, plain = sparse_runs(plan), plain_runs(plan)
    if column in sparse:
        return sparse[column], f"trained {SPARSE}, {sparse[column].method}"
    if column in plain:
        return plain[column], f"trained {PLAIN}: no run of {TABLE_2.key} with it is finished"
    wanted = advice(plan, TABLE_2.key, f"λ = {SHOWN[column][1]}", column)
    raise FileNotFoundError(
        f"{plan.out} has no finished run of {SBM} on {column}: run {wanted} first, or {PLAIN} "
        f"{advice(plan, TABLE_1.key, SBM, column)}"
    )


def pictures(task: Task) -> Iterator[tuple[Tensor, int]]:
    """The test examples: pixels (n,) and label."""
    examples: Any = task.load().test
    for i in range(len(examples)):
        batch = task.collate([examples[i]])
        yield batch["input_ids"][0], int(batch["labels"][0])


def attended(path: Path, plan: Any, column: str) -> None:
    """Pictures that the model classifies rightly, and where each of its heads looks in them."""
    trained, how = chosen(plan, column)
    model, task = load(trained.run, plan.data)
    set_seed(evaluation_seed(task.seed, 0))
    shown = sbm_pictures.contrasted(sbm_pictures.first_right(model, pictures(task)), 4)
    if not shown:
        raise ValueError(f"{trained.run}: its model classifies no test example of {column} rightly")
    one_hot = torch.eye(task.vocabulary()["num_labels"])
    names = [task.answer(one_hot[each.label]) for each in shown]
    title = f"SBM-Transformer, {SHOWN[column][0]}: {column}, classified rightly\n{how}"
    sbm_pictures.draw_seen(shown, names, task.vocabulary()["cols"], path, title)


def draw_pathfinder(path: Path, plan: Any) -> None:
    attended(path, plan, "Pathfinder")


def draw_image(path: Path, plan: Any) -> None:
    attended(path, plan, "Image")
