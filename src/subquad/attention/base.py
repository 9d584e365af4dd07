"""The contract: what every attention mechanism is, takes and promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.attention.call import Call, Record, Rows, clean, draw_seed, repeat_heads, weights_by_row
from subquad.attention.checks import check_inputs, checked_seed, refuse_tangents, refuse_unknown_arguments
from subquad.attention.registry import no_such_direction
from subquad.attention.states import entrance
from subquad.attention.states.keys import attend_kept
from subquad.attention.states.replay import Replay
from subquad.attention.states.state import ROLLBACK, Memory, State
from subquad.core.options import Options as BaseOptions


@dataclass(frozen=True)
class Capabilities:
    """What a mechanism can do. What is not declared raises when asked for."""

    causal: bool = True
    bidirectional: bool = True
    cross: bool = False  # queries and keys of different length
    padding: bool = True  # key_mask
    streaming: bool = True  # the causal form goes on token by token: `start` and `extend`
    stochastic: bool = False  # random also in evaluation
    needs_max_length: bool = False
    level: str = "head"  # "head": works on q, k, v; "layer": works on tokens and the layer's projections
    weights: bool = True  # the output is weights × values, and `weights` gives them


class Attention(nn.Module):
    """One attention mechanism, configured.

        y = a(q, k, v, key_mask=None)                   q (B, H, n, d), k and v (B, H or H/g, m, d) → (B, H, n, d)
        y, record = a.observe(q, k, v, key_mask=None)   also a `Record` of the call
        w = a.weights(q, k, key_mask=None)              (B, H, n, m): the effective weights, from the definition
        state = a.start(batch_size)                     streaming, causal only: an empty state
        y, state = a.extend(q, k, v, state)             t ≥ 1 new tokens: any split gives what one call gives

    `key_mask` is bool (B, m), True = a real token. A query with nothing to attend to gives 0. A row of a padded batch
    gives the same output as the row alone: leading and trailing padding is removed before a mechanism sees the row.
    A call is a function of its inputs, the parameters and `seed` (an integer or an int64 tensor without dimensions,
    drawn from torch's global generator if it is not given): it writes no attribute. Fewer key and value heads than
    query heads are grouped query attention: g query heads in a row share a key head.

    A mechanism writes `attend` (fast) and `define` (the dense definition the fast path is checked against), and
    declares everything else about itself here on its class: options, capabilities, cost, examples.
    """

    Options: ClassVar[type[BaseOptions]] = BaseOptions
    capabilities: ClassVar[Capabilities] = Capabilities()
    family: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    cost: ClassVar[str] = ""  # time and memory in n, for people
    exponent: float = 2.0  # operations(n) grow like n^exponent up to logarithms; a property where options decide
    published_positions: ClassVar[str] = "learned"  # how its paper's models know positions; "own": by the mechanism
    positional: bool = True  # who attends to whom depends on positions, not on content and order alone
    data_dependent: bool = False  # how much is computed depends on the values: on sampled graphs, clusters, edge lists
    counting_range: ClassVar[tuple[int, int]] = (512, 2048)  # lengths at which real tensors show the growth of the cost
    countable: int | None = 4096  # `connections` counts sets up to this length; None = a formula for any length
    stays_inside: bool = False  # `attend` reads and writes nothing behind the end of a row
    is_torch_alone: bool = False  # `attend` consists of torch's own operators: torch knows all their derivatives
    grouped: bool = False  # `attend` takes fewer key heads than query heads; else they are repeated for it
    name: ClassVar[str] = ""  # set by the registry
    options: Any
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)  # options that the contract is run with
    gallery: ClassVar[dict[str, Any]] = {}  # options that make a good picture at 64 tokens
    python_only: ClassVar[str] = ""  # an option that is needed and that no text can give
    picture_note: ClassVar[str] = ""  # what `picture` shows where the real sets depend on the tokens
    exceptions: ClassVar[dict[str, str]] = {}  # checks of the contract that cannot hold, each with its reason
    boundary: ClassVar[str] = ""  # what travels where a sequence is divided among processes; "" = it cannot be
    across: Any = None  # the processes that share a sequence, set by `distributed.sequence_parallel`

    def __init__(self, options: Any) -> None:
        """`options` is an instance of the class's `Options`; `subquad.attention` makes it from a spec and keywords."""
        super().__init__()
        self.options = options
        allowed = self.capabilities
        if options.causal and not allowed.causal:
            raise no_such_direction(self.name, causal=True)
        if not options.causal and not allowed.bidirectional:
            raise no_such_direction(self.name, causal=False)
        if allowed.needs_max_length and options.max_length is None:
            raise ValueError(f"{self.name}: max_length is needed, an integer ≥ 1")

    # ---- what a mechanism writes ----

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The fast path: (B, H, n, d). Where the mechanism is positional, rows start at slot 0 and end at `lengths`;
        what it gives behind the end of a row must be 0.
        """
        if self.capabilities.level == "head":
            raise TypeError(f"{self.name}: the class {type(self).__name__} must define `attend(q, k, v, call)`")
        raise TypeError(f"{self.name} does not work on q, k, v")

    def attend_shard(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The fast path on a part of a sequence that is divided among processes: q, k, v (b, H, t, d) of this one.

        `call.shard` says which part it is, and reaches the rest; see `docs/distributed.md`.
        """
        raise TypeError(f"{self.name} cannot be divided among processes")

    @property
    def divides(self) -> bool:
        """Whether a sequence may be divided among processes, with these options."""
        return bool(self.boundary)

    def attend_observed(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Record]:
        """The same, with a record; for mechanisms that have something to tell."""
        return self.attend(q, k, v, call), Record()

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """The effective weights from the definition, (B, H, n, m): slow and simple, k with all H heads.

        Where the mechanism is positional it is given one row at a time, without leading and trailing padding.
        """
        if self.capabilities.level == "head" and self.capabilities.weights:
            raise TypeError(f"{self.name}: the class {type(self).__name__} must define `define(q, k, call)`")
        raise TypeError(f"{self.name} has no weights over tokens")

    def support(self, n: int) -> Tensor:
        """Who may attend to whom: bool (n, n), or (H, n, n) where heads differ. Row = query."""
        full = torch.ones(n, n, dtype=torch.bool)
        return full.tril() if self.options.causal else full

    def picture(self, n: int) -> Tensor:
        """What to draw, (n, n) or (H, n, n): 0 = not attended, 1 = directly, 2 = through a summary."""
        return self.support(n).int()

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        """What a 2 of the picture stands for: the sets of tokens that are summarised, each once, and for every query
        the numbers of those whose summaries it sees.
        """
        return [], [[] for _ in range(n)]

    def token_clusters(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The cluster that every token belongs to, or to most, int64 (B, H, n); None where there are no clusters."""
        return None

    def connections(self, n: int) -> float:
        """How many scores one head computes for a sequence of length n."""
        seen = self.support(n)
        return seen.sum().item() / (len(seen) if seen.dim() == 3 else 1)

    def host_reads(self, padded: bool, dtype: torch.dtype = torch.float32, length: int | None = None) -> str:
        """What the host reads from a GPU in a call, and so waits for; "" = nothing.

        padded: with a key mask. dtype: of the tensors. length: of the sequences, None = of any length. What is read may
        depend on `training`, as dropout does.
        """
        return ""

    @property
    def counted_lengths(self) -> tuple[int, int]:
        """Between which lengths the growth of the cost is counted."""
        return self.counting_range if self.data_dependent else (4096, 65536)

    def update(self, statistics: Tensor) -> None:
        """Move running averages by the statistics of a training step (summed over its micro-batches and processes)."""
        raise TypeError(f"{self.name} keeps no running averages: there is nothing to update")

    def make_memory(self, margin: int) -> Memory:
        """What streaming keeps of the tokens so far, and `margin` tokens more, so that these can be taken back. The
        fallback keeps all.
        """
        return Replay()

    kept_width: int = 0  # numbers of a key that streaming keeps, where that is more than head_dim

    def kept_keys(self, n: int) -> float:
        """How many keys, or summaries of keys, the state of a head has after n tokens, up to a constant."""
        return float(n)

    @property
    def open_size(self) -> str | None:
        """The option that is left open and follows the length of a call: streaming cannot have that."""
        return None

    # ---- what people call ----

    def __call__(self, *args: Any, **named: Any) -> Any:
        """`forward`; an argument that it does not have is answered with the one to give instead."""
        refuse_unknown_arguments(self, named)
        return super().__call__(*args, **named)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        seed: Tensor | int | None = None,
    ) -> Tensor:
        """q (B, H, n, d), k and v (B, H or H/g, m, d) → (B, H, n, d).

        `key_mask` bool (B, m), True = a real token, is for padding; `seed` makes a random call repeatable. There is no
        attn_mask and no is_causal: the mechanism determines who attends to whom, and causal=True is given when it is
        created. Other arguments raise an error that names what to pass instead.
        """
        check_inputs(self, q, k, v, key_mask)
        if self.across is not None:
            return self.across.attend(self, q, k, v, key_mask, seed)
        rows, q, k, v = self._begin(q, k, v, key_mask)
        return rows.restore(self.attend(q, k, v, self._call(rows, seed, q.shape[2])))

    def observe(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, seed: Tensor | int | None = None
    ) -> tuple[Tensor, Record]:
        """The output, and the record of this call."""
        check_inputs(self, q, k, v, key_mask)
        if self.across is not None:
            return self.across.attend(self, q, k, v, key_mask, seed), Record()
        rows, q, k, v = self._begin(q, k, v, key_mask)
        out, record = self.attend_observed(q, k, v, self._call(rows, seed, q.shape[2]))
        return rows.restore(out), record

    @torch.no_grad()
    def weights(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, seed: Tensor | int | None = None
    ) -> Tensor:
        """The effective weights q(j|i), (B, H, n, m), from the definition. The same seed draws the same graphs."""
        check_inputs(self, q, k, k, key_mask)
        return self.differentiable_weights(q, k, key_mask, seed)

    def dense(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, seed: Tensor | int | None = None
    ) -> Tensor:
        """The oracle: the definition's weights times the values, differentiable."""
        check_inputs(self, q, k, v, key_mask)
        v = v if key_mask is None else v.masked_fill(~key_mask[:, None, :, None], 0)
        return self.differentiable_weights(q, k, key_mask, seed).to(v.dtype) @ repeat_heads(v, q.shape[1])

    # ---- streaming ----

    def start(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: Tensor | int | None = None,
        rollback: int | None = ROLLBACK,
    ) -> State:
        """An empty state for `batch_size` rows; device and dtype are those of the parameters unless given.

        `seed` is that of the whole sequence; if one is needed and not given, it is drawn. `rollback` is the number of
        tokens that `state.crop` can remove at least without recomputation; None keeps all tokens, so that any number
        can be removed.
        """
        seed = draw_seed() if seed is None and self.is_random else checked_seed(seed)
        return entrance.start(self, batch_size, device, dtype, seed, rollback)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """The output of t ≥ 1 new slots per row, (B, H, t, d), and the state that includes them.

        `key_mask` bool (B, t) is that of the new slots. Leading padding of a row is ignored; padding inside a row or at
        its end has a position, but is not attended to. Any split of a sequence gives, at its real tokens, the same
        output as one call with seed=state.seed. Do not use the state that was passed in again: see `State`.
        """
        check_inputs(self, q, k, v, key_mask)
        entrance.check_state(self, state, q)
        entrance.check_heads(state, k)
        return entrance.extend(self, q, k, v, state, key_mask)

    def extend_tokens(
        self, query: Tensor, project: Any, state: State, key_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Inside a layer: new tokens (B, t, E) and its projections → heads side by side (B, t, H·d), and the state.

        Projections that depend on positions are those of the new tokens: `state.length` has where they begin.
        """
        q, k, v = project.together(query, query, query)  # (B, H, t, d)
        out, state = self.extend(q, k, v, state, key_mask=key_mask)
        return out.transpose(1, 2).flatten(2), state

    def attend_aligned(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, lengths: Tensor, seed: Tensor | None
    ) -> Tensor:
        """`attend` for rows that begin at slot 0 and have `lengths` positions, real (B, n) of them."""
        if not self.grouped:
            k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        rows = Rows(real, None if real is None else lengths, None, None)
        return self.attend(q, k, v, self._call(rows, seed, q.shape[2]))

    @property
    def maps_by_softmax(self) -> bool:
        """Do kept keys get their weights by a plain softmax of q·k·scale?"""
        return getattr(self.options, "map", "softmax") == "softmax"

    def attend_kept(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, position: Tensor, factors: Tensor | None = None
    ) -> Tensor:
        """New queries at positions (B, t) to the keys that streaming keeps, (B, H, m, d), as far as they are seen, bool
        (B, H or 1, t, m). `factors` (B, H, t, m) is what dropout multiplies the weights with.
        """
        return attend_kept(q, k, v, seen, self.options.softmax_scale, factors)

    def instances(self, batch: int, device: torch.device) -> Tensor:
        """By which numbers dropout counts the heads of a batch, int64 (B, H)."""
        heads = self.options.num_heads
        return torch.arange(batch * heads, device=device).view(batch, heads)

    # ---- inside a layer ----

    def attend_tokens(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        project: Any,
        key_mask: Tensor | None,
        seed: Tensor | int | None = None,
        *,
        want_record: bool = False,
    ) -> tuple[Tensor, Record]:
        """Tokens (B, n, E) and the layer's projections → heads side by side, (B, n, H·d), and the record of the call,
        an empty one unless it is wanted.

        A mechanism of level "layer" (one that projects more than once) overrides this one instead of `attend`.
        """
        q, k, v = project.together(query, key, value)  # (B, H, n, d)
        about: dict[str, Any] = {"key_mask": key_mask, "seed": seed}
        out, record = self.observe(q, k, v, **about) if want_record else (self(q, k, v, **about), Record())
        return out.transpose(1, 2).flatten(2), record

    def token_weights(
        self, query: Tensor, key: Tensor, project: Any, key_mask: Tensor | None, seed: Tensor | int | None = None
    ) -> Tensor:
        """The effective weights inside a layer, (B, H, n, m)."""
        return self.weights(project.queries(query), project.keys(key), key_mask=key_mask, seed=seed)

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in vars(self.options).items() if value is not None)

    # ---- one call ----

    @property
    def is_random(self) -> bool:
        """Does a call need a seed?"""
        return self.capabilities.stochastic or (self.training and self.options.dropout > 0)

    def _begin(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Rows, Tensor, Tensor, Tensor]:
        """q, k and v as `attend` takes them: rows from slot 0 on, padded slots 0, heads repeated where need be."""
        refuse_tangents(self, q, k, v)
        rows = Rows.of(key_mask, align=self.positional)
        q, k, v = (rows.align(x) for x in (q, k, v))
        if not (self.stays_inside and self.positional and rows.is_solid):
            q, k, v = clean(q, k, v, rows.key_mask)
        if not self.grouped:
            k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        return rows, q, k, v

    def _call(self, rows: Rows, seed: Tensor | int | None, slots: int) -> Call:
        dropout = self.options.dropout if self.training else 0.0
        seed = draw_seed() if seed is None and self.is_random else checked_seed(seed)
        lengths = rows.lengths if self.positional else None
        return Call(rows.key_mask, lengths, seed, dropout, self.training, slots)

    def differentiable_weights(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, seed: Tensor | int | None = None
    ) -> Tensor:
        """`define`, a row at a time where the mechanism is positional: each from its first real token to its last."""
        if self.across is not None:
            raise TypeError(f"{self.name}: a process that has a part of the sequence cannot give its weights")
        q, k, _ = clean(q, k, None, key_mask)
        k = repeat_heads(k, q.shape[1])
        call = self._call(Rows.of(key_mask, align=False), seed, q.shape[2])
        if key_mask is None or not self.positional:
            return self.define(q, k, call)
        return weights_by_row(lambda q, k, real: self.define(q, k, call._replace(key_mask=real)), q, k, key_mask)
