"""`start` and `extend` of every mechanism: what is checked, how rows are moved, and who does the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subquad.attention.call import draw_seed
from subquad.attention.checks import refuse_tangents
from subquad.attention.registry import available, mechanism
from subquad.attention.states.state import LEAST, ROLLBACK, Buffers, Chunk, Memory, State, appended, smallest_room
from subquad.kernels.values import may_look, readable, require

if TYPE_CHECKING:
    from subquad.attention.base import Attention


def start(
    module: Attention, batch_size: int, device: Any, dtype: Any, seed: Tensor | None, rollback: int | None
) -> State:
    name, options = module.name, module.options
    if not streams(module):
        able = [other for other in available() if streams(mechanism(other))]
        raise ValueError(f"{name} cannot stream: it has no causal form; mechanisms that can: {', '.join(able)}")
    if not options.causal:
        raise ValueError(f"{name}: streaming needs causal=True, the mechanism was created with causal=False")
    if module.open_size:
        raise ValueError(
            f"{name}: streaming needs sizes that do not depend on the length of a call: pass {module.open_size} or "
            "max_length when the mechanism is created"
        )
    for label, value, smallest in (("batch_size", batch_size, 1), ("rollback", rollback, 0)):
        if label == "rollback" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < smallest:
            also = ", or None to keep all tokens" if label == "rollback" else ""
            shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{label} must be an integer ≥ {smallest}{also}, not {shown}")
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    device = device if device is not None else torch.device("cpu") if like is None else like.device
    dtype = dtype if dtype is not None else torch.get_default_dtype() if like is None else like.dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point dtype, not {dtype!r}")
    zero = torch.zeros(batch_size, dtype=torch.int64, device=device)
    memory = memory_of(module, rollback)
    tokens: Buffers | None = {} if rollback is None and memory.forgets else None
    return State(name, memory, zero, zero, seed, rollback, dtype, even=0, bound=0, tokens=tokens)


STEADY = (4, 16)  # tokens that sets of one's own are tried at


def require_steady_sets(name: str, is_nested_at: Callable[[int], bool]) -> None:
    """Refuse sets that follow from the length: streaming does not know how long a sequence becomes, so that what a
    query saw would be the set of another length. `is_nested_at`: are the sets of n tokens those of up to 2n, cut off?
    """
    for n in STEADY:
        if not is_nested_at(n):
            raise ValueError(
                f"{name}: streaming needs sets that do not depend on the length of the sequence, but those of {n} "
                f"tokens are not those of up to {2 * n} tokens, cut off"
            )


def streams(module: Attention | type[Attention]) -> bool:
    """Can it process a sequence token by token?"""
    return module.capabilities.streaming and module.capabilities.causal


def memory_of(module: Attention, rollback: int | None) -> Memory:
    """What `module` keeps in a state that can take back so many tokens."""
    return module.make_memory(max(LEAST, ROLLBACK if rollback is None else rollback))


def extend(
    module: Attention, q: Tensor, k: Tensor, v: Tensor, state: State, key_mask: Tensor | None
) -> tuple[Tensor, State]:
    refuse_tangents(module, q, k, v)
    chunk, shift = arranged(state, (q, k, v), key_mask)
    chunk = checked_length(module, state, chunk)
    state = recomputed(module, seeded(module, state))
    out, buffers = state.memory.extend(module, chunk, state)
    if chunk.here is not None:
        out = out.masked_fill(~chunk.here[:, None, :, None], 0)
    return moved_back(out, shift), extended(state, chunk, buffers)


def extend_tokens(
    module: Attention, x: Tensor, state: State, key_mask: Tensor | None, project: Any
) -> tuple[Tensor, State]:
    """The same for a mechanism that works on tokens (B, t, E), each of which is query, key and value in one."""
    check_state(module, state, x)
    refuse_tangents(module, x)
    x = x[:, None]  # (B, 1, t, E)
    chunk, shift = arranged(state, (x, x, x), key_mask)
    chunk = checked_length(module, state, chunk._replace(q=chunk.k))
    state = recomputed(module, seeded(module, state), project)
    memory: Any = state.memory  # that of such a mechanism projects the tokens
    out, buffers = memory.extend(module, chunk, state, project)
    return moved_back(out, shift), extended(state, chunk, buffers)


def seeded(module: Attention, state: State) -> State:
    """The state with a seed, where something is drawn: a state that evaluation began has none for training."""
    return replace(state, seed=draw_seed()) if state.seed is None and module.is_random else state


def recomputed(module: Attention, state: State, *project: Any) -> State:
    """The state itself; after a crop beyond what its buffers keep, one of the same length from the kept tokens."""
    if not state.stale:
        return state
    if torch.compiler.is_compiling():
        raise ValueError(f"{module.name}: the state is to be recomputed after a crop: extend it eagerly once")
    assert state.tokens is not None
    even = state.even
    n = int(state.length.max()) if even is None else even
    q, k, v = (state.tokens.get(name, state.tokens["k"])[:, :, :n] for name in "qkv")
    position = torch.arange(n, device=state.device).expand(state.batch_size, n)
    here = position < state.length[:, None]
    real = state.tokens["real"][:, :n] & here
    chunk = Chunk(q, k, v, position, real, here, state.length, None, state.bound)
    if even is not None or bool(real.all()):
        chunk = Chunk(q, k, v, position, None, None, state.length[:1], None if even is None else 0, state.bound)
    zero = torch.zeros_like(state.length)
    empty = replace(state, length=zero, high=zero, even=0, buffers={}, tokens=None, stale=False)
    _, buffers = state.memory.extend(module, chunk, empty, *project)
    return replace(extended(empty, chunk, buffers), even=even, tokens=state.tokens)


def extended(state: State, chunk: Chunk, buffers: Buffers) -> State:
    length = state.length + chunk.added
    even = None if chunk.even is None else chunk.even + chunk.q.shape[2]
    high, heads, tokens = state.high.maximum(length), chunk.k.shape[1], state.tokens
    if tokens is not None:
        news = {"k": chunk.k} if chunk.q is chunk.k else {"q": chunk.q, "k": chunk.k, "v": chunk.v}
        tokens = appended(tokens, news, chunk, 0 if torch.compiler.is_compiling() else chunk.longest(length))
    new = State(
        state.mechanism, state.memory, length, high, state.seed, state.rollback, state.dtype, heads, even, chunk.bound,
        buffers, tokens,
    )  # fmt: skip
    return new.sealed()


def check_state(module: Attention, state: Any, x: Tensor) -> None:
    """Is it a state of this mechanism, for such inputs? Nothing is written before this is known."""
    if not isinstance(state, State):
        raise TypeError(
            f"state must be a State, as {module.name}.start(batch_size) gives it, not {type(state).__name__}"
        )
    state.check_unused()
    if state.mechanism != module.name:
        raise ValueError(f"state belongs to {state.mechanism}, the mechanism is {module.name}")
    if state.batch_size != x.shape[0]:
        raise ValueError(
            f"state has batch size {state.batch_size}, the new tokens have {x.shape[0]}: they must be equal"
        )
    if state.dtype != x.dtype:
        raise TypeError(f"state has dtype {state.dtype}, the new tokens have {x.dtype}")
    if state.device != x.device:
        raise ValueError(f"state is on {state.device}, the new tokens are on {x.device}: move it with state.to(device)")


def check_heads(state: State, k: Tensor) -> None:
    heads = state.key_heads
    if heads is not None and heads != k.shape[1]:
        raise ValueError(f"state has {heads} key heads, k has {k.shape[1]}: they must be equal")


def checked_length(module: Attention, state: State, chunk: Chunk) -> Chunk:
    """The chunk, if no row becomes too long with it; where the host does not know, the device checks."""
    longest, after = module.options.max_length, state.length + chunk.added
    if torch.compiler.is_compiling():
        check_room(module, state, chunk)
        return chunk
    if longest is None or chunk.longest(after) <= longest:
        return chunk
    if chunk.even is None and chunk.bound is not None and not readable(after):
        require((after <= longest).all(), f"{module.name}: the new tokens are beyond max_length={longest}")
        return chunk._replace(bound=longest)
    raise ValueError(
        f"{module.name}: the state has {int(state.length.max())} positions, {chunk.q.shape[2]} more are beyond "
        f"max_length={longest}"
    )


def check_room(module: Attention, state: State, chunk: Chunk) -> None:
    """A compiled graph has buffers of one size: at run time it refuses tokens that there is no room for."""
    rooms = [state.memory.room(state.buffers), module.options.max_length]
    rooms += [state.tokens["real"].shape[1] - 1] if state.tokens else []
    room = smallest_room(rooms)
    if room is not None:
        text = f"{module.name}: the state has room for {room} positions in a compiled step: state.reserve(length) makes"
        text += f" room{'' if module.options.max_length is None else f', up to max_length={module.options.max_length}'}"
        torch._assert_async((state.length + chunk.added <= room).all(), text)


# ---- rows ---------------------------------------------------------------------------------------------------


def arranged(state: State, tokens: tuple[Any, ...], key_mask: Tensor | None) -> tuple[Chunk, Tensor | None]:
    """The new tokens as a chunk, rows that begin with padding moved to their first real token, and by how much, (B,).

    `tokens` are q, k, v (B, H, t, d). None where nothing moves. Without padding there are faster ways, so the host
    looks whether there is any, where it may wait.
    """
    t, tracing = tokens[0].shape[2], torch.compiler.is_compiling()  # a graph that read lengths would be one for these
    even, bound = (None, None) if tracing else (state.even, None if state.bound is None else state.bound + t)
    place = torch.arange(t, device=state.device)
    position = state.length[:, None] + place if t > 1 else state.length[:, None]  # (B, t)
    if key_mask is None or (may_look(key_mask) and bool(key_mask.all())):
        added = torch.full_like(state.length[:1], t)
        return Chunk(*tokens, position, None, None, added, even, bound), None  # type: ignore[call-arg]
    first = torch.where(key_mask, place, t).amin(1)  # (B,): padded slots before the first real one
    shift = torch.where(state.length == 0, first, 0)
    tokens = tuple(cleaned(x, key_mask, keep_finite=not i) for i, x in enumerate(tokens))
    if readable(shift) and not bool(shift.any()):
        added = torch.full_like(state.length[:1], t)
        return Chunk(*tokens, position, key_mask, None, added, None, bound), None  # type: ignore[call-arg]
    from_slot = (place + shift[:, None]) % t  # (B, t)
    q, k, v = (_taken(x, from_slot) for x in tokens)
    here = place < t - shift[:, None]
    return Chunk(q, k, v, position, key_mask.gather(1, from_slot), here, t - shift, None, bound), shift


def moved_back(x: Tensor, shift: Tensor | None) -> Tensor:
    """(B, H, t, d) with every row at the slots it was given in."""
    if shift is None:
        return x
    t = x.shape[2]
    return _taken(x, (torch.arange(t, device=x.device) - shift[:, None]) % t)


def cleaned(x: Tensor, key_mask: Tensor, *, keep_finite: bool) -> Tensor:
    """0 in padded slots; a finite query stays as it is."""
    padded = ~key_mask[:, None, :, None]
    return x.masked_fill(padded & ~torch.isfinite(x) if keep_finite else padded, 0)


def _taken(x: Tensor, slot: Tensor) -> Tensor:
    return x.gather(2, slot[:, None, :, None].expand(x.shape))
