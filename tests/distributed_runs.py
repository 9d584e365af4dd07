"""A team of processes that stays for a whole module of tests, and the comparison of a divided call with a whole one."""

from __future__ import annotations

import copy
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import subquad
from subquad.distributed import sequence_parallel
from subquad.distributed.groups import Group
from subquad.distributed.layouts import Layout

PATIENCE = 600  # seconds until a process is believed to hang: machines are busy


class Team:
    """p gloo processes that call what they are told, all at the same time."""

    def __init__(self, size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("forkserver")  # the server imports everything once
        context.set_forkserver_preload(["subquad.distributed", "subquad.models", "subquad.layers"])
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, rank, size, port), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(group, *args) in every process: what each returns, or the error of the first that raises."""
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = [pipe.recv() if pipe.poll(PATIENCE) else (None, "no answer") for pipe in self.pipes]
        wrong = [f"process {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        assert not wrong, "\n".join(wrong)
        return [found for found, _ in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()


def _work(pipe: Any, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo")
    group = Group(dist.group.WORLD)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(group, *args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


# ---- comparisons ----------------------------------------------------------------------------------------------------

MASKS = ("none", "right", "left", "interior")


def make_mask(kind: str, batch: int, n: int) -> torch.Tensor | None:
    if kind == "none":
        return None
    mask = torch.ones(batch, n, dtype=torch.bool)
    if kind == "right":
        mask[0, n * 2 // 3 :] = False
        mask[-1] = False
    elif kind == "left":
        mask[0, : n // 4] = False
        mask[-1, n - 1 :] = False
    else:
        mask[:, n // 3 : n // 2] = False
        mask[0, :2] = False
    return mask


def grad(x: torch.Tensor) -> torch.Tensor:
    """The gradient, 0 where none has come."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def close(found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float | None = None) -> None:
    tolerance = tolerance or (1e-9 if expected.dtype == torch.float64 else 1e-5)
    gap = (found - expected).abs().max().item() if expected.numel() else 0.0
    size = max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    assert gap <= tolerance * size, f"{what}: {gap:.3g} apart, at most {expected.abs().max().item():.3g} large"


def compare(
    group: Group, spec: str, causal: bool, n: int, mask: str = "none", dtype: str = "float64", dropout: float = 0.0,
    heads: int = 2, kv_heads: int = 2, layout: str = "contiguous",
) -> None:  # fmt: skip
    """A mechanism on q, k, v: outputs and all gradients of the parts are those of the whole."""
    where = f"{spec} causal={causal} n={n} {mask} {dtype} dropout={dropout}"
    torch.manual_seed(n)
    kind, batch, d = getattr(torch, dtype), 2, 8
    whole = subquad.attention(spec, num_heads=heads, head_dim=d, causal=causal, dropout=dropout).to(kind)
    shapes = [(batch, heads, n, d), (batch, kv_heads, n, d), (batch, kv_heads, n, d), (batch, heads, n, d)]
    *inputs, weight = (torch.randn(shape, dtype=kind) for shape in shapes)
    key_mask, seed = make_mask(mask, batch, n), torch.tensor(11)
    if key_mask is not None:  # what stands in padded slots never matters
        inputs = [x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in inputs]
        weight = weight.masked_fill(~key_mask[:, None, :, None], 0)
    divided = sequence_parallel(copy.deepcopy(whole), group, layout=layout)
    xs = [x.clone().requires_grad_() for x in inputs]
    expected = whole(*xs, key_mask=key_mask, seed=seed)
    (expected * weight).sum().backward()
    cut = Layout(group, n, zigzag=layout == "zigzag")

    def part(x: torch.Tensor) -> torch.Tensor:
        return cut.take(x.transpose(1, 2)).transpose(1, 2).contiguous()

    ys = [part(x).requires_grad_() for x in inputs]
    found = divided(*ys, key_mask=None if key_mask is None else cut.take(key_mask), seed=seed)
    (found * part(weight)).sum().backward()
    real = torch.ones(batch, n, dtype=torch.bool) if key_mask is None else key_mask
    kept = part(real[:, None, :, None])
    close(found.masked_fill(~kept, 0), part(expected).masked_fill(~kept, 0), f"{where}: output")
    for name, x, y in zip("qkv", xs, ys, strict=True):
        close(grad(y), part(grad(x)), f"{where}: gradient of {name}")
    for (name, p), q in zip(whole.named_parameters(), divided.parameters(), strict=True):
        close(group.total(grad(q)), grad(p), f"{where}: gradient of {name}")


def compare_layer(
    group: Group, spec: str, causal: bool, n: int, mask: str = "none", dtype: str = "float64", dropout: float = 0.0
) -> None:
    """A whole layer, for mechanisms that work on tokens."""
    where = f"{spec} causal={causal} n={n} {mask} {dtype}"
    torch.manual_seed(n)
    kind, batch, width = getattr(torch, dtype), 2, 16
    whole = subquad.MultiheadAttention(width, 2, attention=spec, causal=causal, batch_first=True, dropout=dropout)
    whole = whole.to(kind)
    x, weight = torch.randn(2, batch, n, width, dtype=kind).unbind()
    key_mask = make_mask(mask, batch, n)
    if key_mask is not None:
        weight = weight.masked_fill(~key_mask[..., None], 0)
    divided, cut = sequence_parallel(copy.deepcopy(whole), group), Layout(group, n)
    a, b = x.clone().requires_grad_(), cut.take(x).clone().requires_grad_()
    outs = []
    for layer, y, m in ((whole, a, key_mask), (divided, b, None if key_mask is None else cut.take(key_mask))):
        torch.manual_seed(3)
        outs.append(layer(y, y, y, key_padding_mask=None if m is None else ~m, need_weights=False)[0])
    (outs[0] * weight).sum().backward()
    (outs[1] * cut.take(weight)).sum().backward()
    kept = torch.ones(batch, cut.length, 1) if key_mask is None else cut.take(key_mask)[..., None]
    close(outs[1] * kept, cut.take(outs[0]) * kept, f"{where}: output")
    close(grad(b), cut.take(grad(a)), f"{where}: gradient of x")
    for (name, p), q in zip(whole.named_parameters(), divided.parameters(), strict=True):
        close(group.total(grad(q)), grad(p), f"{where}: gradient of {name}")


# ---- models ---------------------------------------------------------------------------------------------------------


def make_model(head: str, spec: str, **keys: Any) -> Any:
    from subquad.models import HEADS, SubquadConfig

    torch.manual_seed(5)
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 24, "max_position_embeddings": 64, "num_labels": 3}  # fmt: skip
    return HEADS[head](SubquadConfig(attention=spec, **{**sizes, **keys})).double().train()


def make_batch(head: str, n: int, mask: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(n)
    ids = torch.randint(30, (2, n))
    labels = torch.randint(3, (2,)) if head == "sequence" else ids.clone() % (3 if head == "token" else 30)
    batch = {"input_ids": ids, "labels": labels}
    real = make_mask(mask, 2, n)
    if real is not None:
        real[-1, : n // 2] = True  # no row of padding alone
        batch["attention_mask"] = real.long()
        if labels.dim() == 2:
            batch["labels"] = labels.masked_fill(~real, -100)
    return batch


def compare_model(group: Group, head: str, spec: str, n: int, mask: str, keys: dict[str, Any], how: str = "") -> None:
    """The loss of a divided model is that of the whole one, and so are the averaged gradients.

    how="checkpointing": blocks are computed again in the backward pass; "alone": the whole model is one that is divided
    among one process, so that dropout goes by position in both.
    """
    from subquad.distributed import average_gradients, shard

    where = f"{head} {spec} n={n} {mask} {keys} {how}"
    model, batch = make_model(head, spec, **keys), make_batch(head, n, mask)
    divided = sequence_parallel(copy.deepcopy(model), group)
    if "alone" in how:
        singles = [dist.new_group([rank]) for rank in range(group.size)]
        sequence_parallel(model, Group(singles[group.rank]))
    if "checkpointing" in how:
        divided.gradient_checkpointing_enable({"use_reentrant": False})
    losses = []
    for one, inputs in ((model, batch), (divided, shard(batch, group))):
        torch.manual_seed(9)
        loss = one(**inputs).loss
        loss.backward()
        losses.append(loss.detach())
    average_gradients(divided, group)
    close(losses[1], losses[0], f"{where}: loss")
    for (name, p), q in zip(model.named_parameters(), divided.parameters(), strict=True):
        close(q.grad, p.grad, f"{where}: gradient of {name}", 1e-7)  # the models' loss is computed in float32
