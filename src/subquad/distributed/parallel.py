"""`sequence_parallel`: a mechanism or a model whose sequences are divided among processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention.base import Attention
from subquad.attention.call import draw_seed
from subquad.attention.registry import available, mechanism
from subquad.core.hashing import dropout_factors
from subquad.distributed import exchange
from subquad.distributed.across import Across
from subquad.distributed.groups import Group
from subquad.distributed.layouts import Closing, Layout, agree, current, enter, leave

IGNORED = -100  # a label that does not count
BUCKET = 1 << 25  # bytes of gradients that are averaged at a time


def sequence_parallel(model: Any, mesh: Any, *, layout: str = "contiguous") -> Any:
    """Divide the sequences of a model, or of one mechanism, among the processes of a mesh dimension. In place.

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "sequence"))
        model = sequence_parallel(model, mesh["sequence"])
        loss = model(**shard(batch, mesh["sequence"])).loss        # that of the whole batch, on every process
        loss.backward()
        average_gradients(model, mesh["sequence"])                 # or wrap the model in DDP over all processes

    Process r of p is given the r-th part of every sequence (`shard` cuts a batch). Positions, the shift of labels, the
    number of labels and the loss are those of the whole batch; all processes compute the same loss, so gradients are
    averaged over them, as DistributedDataParallel does. layout="zigzag" balances causal full attention.

    Every call is made by all processes of the group together, in the same order.
    """
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f"layout must be contiguous or zigzag, not {layout!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    group = mesh if isinstance(mesh, Group) else Group(mesh)
    zigzag = layout == "zigzag"
    found = [part for part in model.modules() if isinstance(part, Attention)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention of subquad: swap or convert it first")
    for part in found:
        check(part, zigzag)
    whole(model)
    for part in found:
        part.across = Across(group, zigzag)
    for layer in model.modules():
        if type(layer) is nn.Dropout:
            layer.__class__ = SequenceDropout
            layer.group = group  # type: ignore[assignment]
    if not isinstance(model, Attention) and {"input_ids", "inputs_embeds"} & set(_parameters(model)):
        _Hooks(group, zigzag).attach(model)
    return model


def whole(model: Any) -> Any:
    """Undo `sequence_parallel`: the model takes whole sequences again. In place."""
    for part in model.modules():
        if isinstance(part, Attention):
            part.across = None
        elif type(part) is SequenceDropout:
            part.__class__ = nn.Dropout  # type: ignore[assignment]
    for handle in getattr(model, "_sequence_hooks", ()):
        handle.remove()
    return model


def check(part: Attention, zigzag: bool = False) -> None:
    """Refuse a mechanism that cannot be divided, with the names of those that can."""
    if zigzag and part.name != "full":
        raise ValueError(f"layout='zigzag' is for full attention, not for {part.name}: its shards are contiguous")
    if not part.divides:
        options = " with these options" if part.boundary else ""
        raise ValueError(f"{part.name}{options} cannot be divided among processes; these can: {', '.join(divisible())}")


def divisible() -> list[str]:
    """The mechanisms that say what crosses a boundary."""
    return [name for name in available() if mechanism(name).boundary]


# ---- batches and losses ---------------------------------------------------------------------------------------------


def shard(batch: Mapping[str, Any], mesh: Any, *, layout: str = "contiguous") -> dict[str, Any]:
    """This process's part of a whole batch: tensors (B, n, …) are cut, all others stay.

    n is that of `input_ids` (or `inputs_embeds`). Labels (B, n) are cut like the ids; a causal model shifts them across
    the boundaries, so that the last token of a part predicts the first one of the next.
    """
    group = mesh if isinstance(mesh, Group) else Group(mesh)
    main = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(main, Tensor):
        raise ValueError(f"batch needs input_ids or inputs_embeds, a tensor (B, n), and has {', '.join(batch)}")
    whole = Layout(group, main.shape[1], zigzag=layout == "zigzag")
    if main.shape[1] < group.size:
        raise ValueError(f"a sequence of {main.shape[1]} tokens cannot be divided among {group.size} processes")
    return {
        key: whole.take(x) if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == whole.n else x
        for key, x in batch.items()
    }


def same_batches(loader: Any, mesh: Any) -> Any:
    """A data loader that Accelerate has prepared, changed so that processes with the same place in `mesh`, the data
    dimension, read the same batches: those that share their sequences. In place.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    if hasattr(sampler, "num_processes"):  # Accelerate gives every process batches of its own
        sampler.num_processes, sampler.process_index = mesh.size(), mesh.get_local_rank()
    return loader


def total(x: Tensor, mesh: Any) -> Tensor:
    """The sum over the processes, with a gradient: the loss of a whole batch from those of its parts.

    All processes then have the same loss, and the average of their gradients is its gradient.
    """
    return exchange.total(mesh if isinstance(mesh, Group) else Group(mesh), x)


@torch.no_grad()
def average_gradients(model: nn.Module, mesh: Any) -> None:
    """After the backward pass: gradients averaged over the processes of a mesh dimension, in place.

    For training without DistributedDataParallel, or with DDP or FSDP over the other dimension of the mesh.
    """
    group = mesh if isinstance(mesh, Group) else Group(mesh)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    grads = [getattr(grad, "_local_tensor", grad) for grad in grads]  # FSDP: the part that this process has
    for bucket in _buckets(grads):
        mean = group.total(torch.cat([grad.flatten() for grad in bucket])) / group.size
        for grad, piece in zip(bucket, mean.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(piece.view_as(grad))


def _buckets(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    found: list[list[Tensor]] = []
    size = 0
    for grad in grads:
        if not found or size + grad.nbytes > BUCKET or grad.dtype != found[-1][0].dtype:
            found.append([])
            size = 0
        found[-1].append(grad)
        size += grad.nbytes
    return found


# ---- inside a model -------------------------------------------------------------------------------------------------


class SequenceDropout(nn.Dropout):
    """Dropout by position: (B, t, D) of this process drops what these tokens drop on any number of processes."""

    group: Any

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        layout = current()
        if x.dim() != 3 or (layout is not None and x.shape[1] != layout.length):
            return super().forward(x)
        seed = draw_seed()  # the generators of the processes agree: see _Hooks
        if layout is None:  # a block that is computed again in the backward pass
            layout = agree(self.group, x.shape[1], x.shape[0], None)
        row, place = torch.arange(len(x), device=x.device)[:, None, None], layout.places(x.device)[:, None]
        about = (row, place, torch.arange(x.shape[2], device=x.device), x.dtype)
        return x * dropout_factors(seed, self.p, *about)


class _Hooks:
    """What surrounds the forward pass of a divided model: the layout before it, the whole loss after it."""

    def __init__(self, group: Group, zigzag: bool) -> None:
        self.group, self.zigzag = group, zigzag
        # of calls under way: the token of the layout, whether to add losses, how gaps were closed
        self.stack: list[tuple[Any, bool, Closing | None]] = []

    def __deepcopy__(self, memo: Any) -> _Hooks:
        return _Hooks(self.group, self.zigzag)

    def attach(self, model: nn.Module) -> None:
        whole_again = (
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        )
        model.__dict__["_sequence_hooks"] = whole_again

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        names = _parameters(model)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        main = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if not isinstance(main, Tensor):
            raise ValueError(
                "input_ids or inputs_embeds is missing: a tensor (B, t), this process's part of a sequence"
            )
        mask = given.get("attention_mask")
        mask = None if mask is None else mask.bool()
        layout = agree(self.group, main.shape[1], main.shape[0], mask, int(draw_seed()), self.zigzag)
        _check_length(model, layout)
        _check_packed(given, layout)
        if model.training and any(_draws(part) for part in model.modules()):
            torch.manual_seed(layout.seed)  # all processes now draw the same seeds, and drop by position
        if given.get("position_ids") is None and "position_ids" in names:
            own = _closes_gaps(model)  # ours count real tokens, those of transformers count slots
            given["position_ids"] = layout.positions(main.device) if own else layout.places(main.device)[None]
        per_token = self._labels(model, given, layout, main)
        closing = Closing.of(layout) if _closes_gaps(model) else None
        if closing is not None:
            layout = closing.inside
            given = {name: closing.close(x) for name, x in given.items()}
        self.stack.append((enter(layout), per_token, closing))
        return (), given

    def _labels(self, model: nn.Module, given: dict[str, Any], layout: Layout, main: Tensor) -> bool:
        """Labels of tokens: shifted across boundaries, and counted in the whole batch."""
        shifted: Any = given.get("shift_labels")
        labels: Any = given.get("labels")
        if shifted is None and (labels is None or labels.shape[:2] != main.shape[:2] or labels.is_floating_point()):
            return False
        names = _parameters(model)
        takes = {*names, *getattr(model.forward, "unseen", ())}
        takes |= {"shift_labels", "num_items_in_batch"} if names[-1:] == ["**"] else set()
        if shifted is None and _is_causal(model) and "shift_labels" in takes:
            whole = layout.joined(labels)
            shifted = layout.take(nn.functional.pad(whole[:, 1:], (0, 1), value=IGNORED)).contiguous()
            given["shift_labels"] = shifted
        if given.get("num_items_in_batch") is None:
            if "num_items_in_batch" not in takes:
                raise ValueError(
                    f"{type(model).__name__}.forward takes no num_items_in_batch, so its loss cannot be that of the "
                    "whole batch: leave labels out, and add up your own loss with subquad.distributed.total"
                )
            count = ((labels if shifted is None else shifted) != IGNORED).sum()
            given["num_items_in_batch"] = layout.group.total(count).clamp(min=1)
        return True

    def after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self.stack:  # `before` has raised
            return output
        token, per_token, closing = self.stack.pop()
        leave(token)
        if output is None:
            return output
        if closing is not None:
            output = _mapped(output, closing.open)
        if not per_token:
            return output
        if isinstance(output, tuple):
            return exchange.total(self.group, output[0]), *output[1:]
        output["loss"] = exchange.total(self.group, output["loss"])
        return output


def _parameters(model: nn.Module) -> list[str]:
    """Names of the arguments of `forward`; "**" at the end if it takes any."""
    found = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [*names, "**"] if any(p.kind == p.VAR_KEYWORD for p in found) else names


def _is_causal(model: nn.Module) -> bool:
    return bool(getattr(model, "causal", type(model).__name__.endswith("ForCausalLM")))


def _draws(part: nn.Module) -> bool:
    return (isinstance(part, nn.Dropout) and part.p > 0) or (isinstance(part, Attention) and part.is_random)


def _closes_gaps(model: nn.Module) -> bool:
    """Does the model put the real tokens of a row together before its attention sees them?"""
    return any(getattr(part, "closes_gaps", False) for part in model.modules())


def _check_packed(given: Mapping[str, Any], layout: Layout) -> None:
    """Refuse rows that hold several sequences."""
    positions: Any = given.get("position_ids")
    packed = given.get("cu_seqlens") is not None
    if not packed and positions is not None and positions.dim() == 2:
        begins = layout.joined((positions == 0).byte()).bool()  # (B or 1, n)
        packed = bool((begins if layout.key_mask is None else begins & layout.key_mask).sum(1).gt(1).any())
    if packed:
        raise ValueError(
            "a packed batch cannot be divided among processes (position_ids restart at 0, or cu_seqlens is given): "
            "give every sequence a row of its own"
        )


def _mapped(output: Any, change: Any) -> Any:
    """The tensors of a model's output, one by one."""
    if isinstance(output, MutableMapping):
        for key in list(output):
            output[key] = change(output[key])
        return output
    return change(output)


def _check_length(model: nn.Module, layout: Layout) -> None:
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if longest is not None and layout.n > longest:
        raise ValueError(f"the sequence has length {layout.n}, beyond max_position_embeddings={longest}")
