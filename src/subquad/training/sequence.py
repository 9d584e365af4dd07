"""Training with sequences that are divided among processes: --set sequence_parallel=4 under torchrun.

Every process of a group reads the same batch and takes its part of it. DistributedDataParallel averages the gradients
over all processes, which is right in both dimensions of the mesh: see `distributed.sequence_parallel`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from subquad.attention.registry import attention
from subquad.distributed import same_batches, sequence_parallel, shard
from subquad.distributed.groups import Group
from subquad.distributed.layouts import Layout
from subquad.distributed.parallel import check
from subquad.models import HEADS
from subquad.tasks.base import IGNORED
from subquad.training.processes import world_size

DIVIDED = ("causal-lm", "masked-lm", "token", "sequence")


def data_processes(recipe: Any) -> int:
    """Among how many groups of processes the sequences of a batch are shared out."""
    processes, p = world_size(), recipe.sequence_parallel
    if processes % p:
        raise ValueError(
            f"sequence_parallel={p} needs a multiple of {p} processes, not {processes}: "
            f"torchrun --nproc-per-node {p} -m subquad train …"
        )
    return processes // p


def check_divided(task: Any, config: Any) -> None:
    """Refuse a task or an attention that cannot be divided, before anything is loaded."""
    if task.head not in DIVIDED:
        raise ValueError(
            f"sequence_parallel: {task.name} has a {task.head} head; it must be one of {', '.join(DIVIDED)}"
        )
    for index in range(min(config.num_hidden_layers, len(config.specs))):
        spec, options = config.layer_options(index, causal=HEADS[task.head].causal)
        check(attention(spec, num_heads=config.num_attention_heads, head_dim=config.head_dim, **options))


class Sequence:
    """The processes that share each sequence of a run, and those that have other sequences."""

    def __init__(self, task: Any, mesh: Any) -> None:
        self.task = task
        self.group = Group(mesh["sequence"])
        self.data = mesh["data"]

    @classmethod
    def of(cls, task: Any, model: Any) -> Sequence:
        """Divide a model as the recipe of its task says."""
        kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
        sizes = (data_processes(task.recipe), task.recipe.sequence_parallel)
        found = cls(task, init_device_mesh(kind, sizes, mesh_dim_names=("data", "sequence")))
        sequence_parallel(model, found.group)
        return found

    def part(self, inputs: Any) -> dict[str, Any]:
        return shard(inputs, self.group)

    def same_batches(self, loader: Any) -> Any:
        return same_batches(loader, self.data)

    @torch.no_grad()
    def evaluate(self, model: Any, dataset: Any, batch: int, prefix: str) -> EvalLoopOutput:
        """The metrics of a data set. The groups take its batches in turn, and put their statistics together."""
        model.eval()
        found, turn = [], self.data.get_local_rank()
        for number, inputs in enumerate(DataLoader(dataset, batch, collate_fn=self.task.collate)):
            if number % self.data.size() == turn:
                loss, statistics = self.scored(model, inputs)
                found.append((float(loss), statistics.double().cpu().numpy()))
        every: list[Any] = [None] * self.data.size()
        dist.all_gather_object(every, found, group=self.data.get_group())
        losses, parts = zip(*(one for some in every for one in some), strict=True)
        mean = float(np.average(losses, weights=[len(part) for part in parts]))
        measured = {"loss": mean, **self.task.measure(np.concatenate(parts))}
        metrics = {f"{prefix}_{key}": value for key, value in measured.items()}
        return EvalLoopOutput(np.concatenate(parts), None, metrics, len(dataset))

    def scored(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of a whole batch, and the statistics of its examples, (B, k)."""
        device = next(model.parameters()).device
        inputs = {key: x.to(device) for key, x in inputs.items()}
        labels = inputs["labels"]
        output = model(**self.part(inputs))
        loss, logits = output.loss, output.logits
        layout = Layout(self.group, inputs["input_ids"].shape[1])
        if labels.dim() < 2 or logits.shape[1] != layout.length:  # one answer per sequence: all processes have it
            return loss, self.task.score(logits, labels)
        if HEADS[self.task.head].causal:  # position i predicts token i + 1: the score shifts, so a place is put before
            following = layout.take(F.pad(labels[:, 1:], (0, 1), value=IGNORED))
            labels = F.pad(following, (1, 0), value=IGNORED)
            logits = F.pad(logits, (0, 0, 0, 1))
        else:
            labels = layout.take(labels)
        return loss, self.group.total(self.task.score(logits, labels))
