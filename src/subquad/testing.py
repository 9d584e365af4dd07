"""The contract, shipped: `check_attention("my-mechanism")` runs every check against any registered mechanism.

Each check is a function of a `Case` (one mechanism, causal or not) that raises AssertionError. A mechanism that
cannot pass one declares it, `exceptions = {"check name": "reason"}`; the declaration is strict: an exception
that no longer fails is an error.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import subquad.kernels.flops  # noqa: F401  (teaches the counter our kernels)
from subquad.attention.base import Attention
from subquad.attention.registry import attention, mechanism
from subquad.core.options import split_spec
from subquad.layers import MultiheadAttention, Projections

LENGTHS = (1, 2, 7, 8, 9, 31, 33, 65)  # 1, 2, b-1, b, b+1, a prime, 2^k ± 1
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


class ContractError(AssertionError):
    """What a mechanism promises and does not hold, one line per check."""


@dataclass(frozen=True)
class Case:
    """One mechanism, causal or not, and the way to call it: on q, k, v, or as a layer on tokens."""

    spec: str
    causal: bool
    options: dict[str, Any] = field(default_factory=dict)
    heads: int = 2
    width: int = 8

    def make(self, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
        torch.manual_seed(0)
        options = {"causal": self.causal, **self.options, **more}
        if self.kind.capabilities.needs_max_length:
            options.setdefault("max_length", 16384)
        if self.is_layer:
            module: Any = MultiheadAttention(
                self.heads * self.width, self.heads, batch_first=True, attention=self.spec, **options
            )
        else:
            module = attention(self.spec, num_heads=self.heads, head_dim=self.width, **options)
        return module.to(dtype).eval()

    @property
    def kind(self) -> type[Attention]:
        return mechanism(split_spec(self.spec)[0])

    @property
    def is_layer(self) -> bool:
        return self.kind.capabilities.level == "layer"

    @property
    def time(self) -> int:
        """Which dimension of inputs and outputs is the sequence."""
        return 1 if self.is_layer else 2

    def inputs(self, n: int, dtype: torch.dtype = torch.float64, batch: int = 2, seed: int = 1) -> list[Tensor]:
        """q, k, v (B, H, n, d), or tokens (B, n, E) for a layer."""
        draw = torch.Generator().manual_seed(seed)
        shape = (batch, n, self.heads * self.width) if self.is_layer else (batch, self.heads, n, self.width)
        return [
            torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for _ in range(1 if self.is_layer else 3)
        ]

    def run(self, module: Any, inputs: list[Tensor], key_mask: Tensor | None = None) -> Tensor:
        torch.manual_seed(2)  # what samples, samples the same in every run
        if not self.is_layer:
            return module(*inputs, key_mask=key_mask)
        padding = None if key_mask is None else ~key_mask
        return module(*inputs * 3, key_padding_mask=padding, need_weights=False)[0]

    def dense(self, module: Any, inputs: list[Tensor], key_mask: Tensor | None = None) -> Tensor:
        """The same from the definition."""
        torch.manual_seed(2)
        if not self.is_layer:
            return module.dense(*inputs, key_mask=key_mask)
        return module.out_proj(module.attention.dense_tokens(*inputs * 3, Projections(module), key_mask))

    def core(self, module: Any) -> Attention:
        return module.attention if self.is_layer else module

    def masks(self, n: int) -> dict[str, Tensor]:
        """Key masks for a batch of 2, none for a mechanism that takes none."""
        return masks(n) if self.kind.capabilities.padding else {}


def masks(n: int) -> dict[str, Tensor]:
    """Key masks for a batch of 2: the first element whole, the second padded left, right or inside."""
    third, place = max(1, n // 3), torch.arange(n)
    padded = {"left": place < third, "right": place >= n - third, "interior": (place >= third) & (place < 2 * third)}
    whole = torch.ones(n, dtype=torch.bool)
    return {side: torch.stack([whole, ~where]) for side, where in padded.items() if n > 1 or side == "right"}


def close(a: Tensor, b: Tensor, tolerance: float, what: str) -> None:
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)} is not {tuple(b.shape)}"
    error = (a - b).abs().max().item() if a.numel() else 0.0
    limit = tolerance * max(1.0, b.abs().max().item() if b.numel() else 0.0)
    assert error <= limit, f"{what}: off by {error:.2e}, allowed {limit:.0e}"


def gradients(out: Tensor, inputs: Sequence[Tensor], module: Any = None) -> list[Tensor]:
    """Gradients of a fixed random projection of `out`, for the inputs and the parameters of `module`."""
    targets = [*inputs, *(p for p in (module.parameters() if module else ()) if p.requires_grad)]
    draw = torch.Generator().manual_seed(3)
    direction = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out.dtype)
    if not out.requires_grad:
        return [torch.zeros_like(t) for t in targets]
    grads = torch.autograd.grad(out, targets, direction, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, targets, strict=True)]


# ---- the checks ---------------------------------------------------------------------------------------------


def fast_equals_dense(case: Case) -> None:
    """Values and gradients of the fast path are those of the dense definition, at every awkward length."""
    for dtype, tolerance in TOLERANCE.items():
        module = case.make(dtype)
        for n in LENGTHS if dtype == torch.float64 else (9, 33):
            for name, mask in {"no": None, **(case.masks(n) if n in (2, 9, 33) else {})}.items():
                xs = [x.requires_grad_() for x in case.inputs(n, dtype)]
                fast, slow = case.run(module, xs, mask), case.dense(module, xs, mask)
                what = f"n={n}, {name} padding, {dtype}"
                close(fast, slow, tolerance, f"value at {what}")
                pairs = zip(gradients(fast, xs, module), gradients(slow, xs, module), strict=True)
                for index, (a, b) in enumerate(pairs):
                    close(a, b, tolerance, f"gradient {index} at {what}")


def weights_are_probabilities(case: Case) -> None:
    """Weights are ≥ 0, sum to 1 where there is support, and cover exactly the declared support."""
    if case.is_layer:
        return  # a layer's output is not weights × values
    module = case.make()
    sparse = any(getattr(part, "sparse", False) for part in module.modules()) or case.kind.capabilities.stochastic
    for n in (1, 2, 9, 33):
        q, k, _ = case.inputs(n)
        for name, mask in {"no": None, **case.masks(n)}.items():
            torch.manual_seed(2)
            weights = module.weights(q, k, key_mask=mask)  # (B, H, n, n)
            support = module.support(n).expand(2, case.heads, n, n)
            support = support if mask is None else support & mask[:, None, None, :]
            what = f"n={n}, {name} padding"
            assert weights.shape == (2, case.heads, n, n), f"weights have shape {tuple(weights.shape)} at {what}"
            assert (weights >= 0).all(), f"negative weight at {what}"
            assert (weights[~support] == 0).all(), f"weight outside the support at {what}"
            total, alive = weights.sum(-1), (weights > 0).any(-1)
            close(total, alive.to(total), 1e-9, f"sum of weights at {what}")
            if not sparse:
                assert ((weights > 0) == support).all(), f"weights do not cover the support at {what}"


def causal_by_value_and_gradient(case: Case) -> None:
    """Token t changes no output before t, and no gradient says it would."""
    if not case.causal:
        return
    module = case.make()
    for n in (2, 9, 17, 33):
        xs = [x.requires_grad_() for x in case.inputs(n, batch=1)]
        base = case.run(module, xs)
        for t in range(1, n):
            moved = [x.detach().clone() for x in xs]
            for x in moved:
                x.select(case.time, t).add_(3.0)
            after = case.run(module, moved)
            before = (slice(None),) * case.time + (slice(0, t),)
            assert torch.equal(after[before], base[before]), f"n={n}: token {t} changes an earlier output"
            if base.requires_grad:
                grads = torch.autograd.grad(base[before].sum(), xs, retain_graph=True, allow_unused=True)
                for g in (g for g in grads if g is not None):
                    future = g.narrow(case.time, t, n - t)
                    assert not future.any(), f"n={n}: outputs before {t} have a gradient at or behind {t}"


def padding_is_invisible(case: Case) -> None:
    """What stands in padded slots, NaN included, reaches no output; a batch element stands for itself."""
    if not case.kind.capabilities.padding:
        return
    module = case.make()
    for n in (2, 9, 33):
        for side, mask in case.masks(n).items():
            xs = case.inputs(n)
            base = case.run(module, xs, mask)
            real = mask if case.is_layer else mask[:, None].expand(2, case.heads, n)
            for value in (1e9, math.nan, math.inf):
                spoilt = [_spoil(case, x, mask, value) for x in xs]
                out = case.run(module, spoilt, mask)
                assert torch.equal(out[real], base[real]), f"n={n}: {value} in {side} padding changes real tokens"
                assert value == 1e9 or out.isfinite().all(), f"n={n}: {value} in {side} padding reaches an output"
            if not case.kind.capabilities.stochastic:
                alone = case.run(module, [x[1:] for x in xs], mask[1:])
                close(alone[real[1:]], base[1:][real[1:]], 1e-9, f"n={n}: batch of 1, {side} padding")
        nobody = torch.zeros(2, n, dtype=torch.bool)
        xs = [x.requires_grad_() for x in case.inputs(n)]
        out = case.run(module, xs, nobody)
        empty = case.dense(module, xs, nobody)
        close(out, empty, 1e-9, f"n={n}: nothing but padding")
        if not case.is_layer:
            assert not out.any(), f"n={n}: a query with nothing to attend to must give 0"
        assert all(g.isfinite().all() for g in gradients(out, xs, module)), f"n={n}: gradient of an empty row"


def _spoil(case: Case, x: Tensor, mask: Tensor, value: float) -> Tensor:
    padded = ~mask[:, :, None] if case.is_layer else ~mask[:, None, :, None]
    return x.masked_fill(padded, value)


def no_state_between_calls(case: Case) -> None:
    """A short batch changes nothing for a later long one."""
    module = case.make()
    with torch.no_grad():
        first = case.run(module, case.inputs(65))
        for n in (1, 5, 129):
            case.run(module, case.inputs(n, batch=3))
        assert torch.equal(case.run(module, case.inputs(65)), first), "the same call gives another result later"


def any_layout_and_dtype(case: Case) -> None:
    """Non-contiguous inputs, half precision, large magnitudes, gradients for only some inputs."""
    module = case.make()
    xs = case.inputs(33)
    base = case.run(module, xs)
    strange = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in xs]
    close(case.run(module, strange), base, 1e-12, "non-contiguous inputs")
    wide = [torch.cat([x, x], case.time)[(slice(None),) * case.time + (slice(0, 33),)] for x in xs]
    close(case.run(module, wide), base, 1e-12, "inputs that are slices")
    for dtype in (torch.bfloat16, torch.float16):
        half = case.run(case.make(dtype), case.inputs(33, dtype))
        assert half.dtype == dtype, f"{dtype} in, {half.dtype} out"
        assert half.isfinite().all(), f"{dtype}: not finite"
        if not case.kind.capabilities.stochastic:  # rounding moves the edges that are sampled
            exact = case.run(case.make(dtype).double(), [x.double() for x in case.inputs(33, dtype)])
            close(half.double(), exact, 0.04 if dtype == torch.bfloat16 else 0.01, str(dtype))
    for dtype in (torch.float32, torch.float16):
        loud = [(x * 100).to(dtype).requires_grad_() for x in case.inputs(33)]  # logits of 1e4
        module = case.make(dtype)
        out = case.run(module, loud)
        assert out.isfinite().all(), f"{dtype}: logits of 1e4 are not finite"
        if dtype == torch.float32:
            assert all(g.isfinite().all() for g in gradients(out, loud, module)), "gradients at logits of 1e4"
    module = case.make()
    for chosen in range(len(xs)):
        some = [x.detach().clone().requires_grad_(index == chosen) for index, x in enumerate(xs)]
        every = [x.detach().clone().requires_grad_() for x in xs]
        alone, whole = (gradients(case.run(module, ys), [ys[chosen]])[0] for ys in (some, every))
        close(alone, whole, 1e-12, f"gradient of input {chosen} alone")


def compiles(case: Case) -> None:
    """torch.compile(fullgraph=True) gives eager's values and gradients."""
    module = case.make(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for n, name in ((9, "right"), (33, "no")):
        mask = case.masks(n).get(name)
        xs = [x.requires_grad_() for x in case.inputs(n, torch.float32)]
        eager, graph = case.run(module, xs, mask), case.run(compiled, xs, mask)
        close(graph, eager, 1e-5, f"compiled value at n={n}")
        pairs = zip(gradients(graph, xs, module), gradients(eager, xs, module), strict=True)
        for a, b in pairs:
            close(a, b, 1e-5, f"compiled gradient at n={n}")
    torch._dynamo.reset()


def copies_and_seeds(case: Case) -> None:
    """state_dict, pickle and deepcopy round trips; the same seed gives the same result."""
    module, xs = case.make(), case.inputs(33)
    base = case.run(module, xs)
    other = case.make()
    for p in other.parameters():
        nn.init.normal_(p)
    other.load_state_dict(module.state_dict())
    for what, twin in (
        ("state_dict", other),
        ("pickle", pickle.loads(pickle.dumps(module))),
        ("deepcopy", copy.deepcopy(module)),
    ):
        assert torch.equal(case.run(twin, xs), base), f"{what}: the copy gives another result"
    assert torch.equal(case.run(module, xs), base), "the same seed gives another result"


def dropout_is_fair(case: Case) -> None:
    """Dropout acts in training only, follows the seed and keeps the mean."""
    module = case.make(dropout=0.3)
    one = case.inputs(7, batch=1)
    many = [x.repeat_interleave(256, 0) for x in one]
    base = case.run(case.make(), one)
    if not case.kind.capabilities.stochastic:
        close(case.run(module, one), base, 1e-12, "dropout in evaluation")
    module.train()
    with torch.no_grad():
        first = case.run(module, many)
        assert torch.equal(first, case.run(module, many)), "dropout does not follow the seed"
        if case.kind.capabilities.stochastic:
            return
        assert first.std(0).max() > 0.01, "dropout drops nothing"
        error, spread = (first.mean(0) - base[0]).abs(), first.std(0) / 16
        assert (error <= 6 * spread + 1e-9).all(), (
            f"dropout moves the mean by {(error / spread).max():.1f} standard errors"
        )


def grows_as_declared(case: Case) -> None:
    """Operations, and bytes kept for the backward, grow no faster than n to the declared exponent."""
    module, sizes = case.make(torch.float32), (1024, 4096)
    counts, kept = [], []
    for n in sizes:
        xs = [x.requires_grad_() for x in case.inputs(n, torch.float32, batch=1)]
        storages: dict[int, int] = {}

        def pack(t: Tensor, seen: dict[int, int] = storages) -> Tensor:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            case.run(module, xs).sum().backward()
        counts.append(counter.get_total_flops())
        kept.append(sum(storages.values()))
    assert counts[0] > 0, "no operation was counted"
    declared, step = case.core(module).exponent, math.log(sizes[1] / sizes[0])
    for what, (small, large) in (("operations", counts), ("memory", kept)):
        exponent = math.log(large / small) / step
        limit = max(declared, 1.0) + 0.25  # logarithms and rounded block sizes
        assert exponent <= limit, f"{what} grow like n^{exponent:.2f}, declared n^{declared}"


def bad_input_is_refused(case: Case) -> None:
    """Wrong shapes, masks, lengths and options raise, and the message names the argument."""
    module = case.make()
    if case.is_layer:
        (x,) = case.inputs(9)
        _refuses("query", lambda: module(x[..., :-1], x, x))
        _refuses("key_padding_mask", lambda: module(x, x, x, key_padding_mask=torch.zeros(2, 8, dtype=torch.bool)))
    else:
        q, k, v = case.inputs(9)
        wrong = {
            "q": (q[0], k, v, None),
            "k": (q, k[:, :1], v, None),
            "v": (q, k, v[..., :-1], None),
            "key_mask": (q, k, v, torch.ones(2, 8, dtype=torch.bool)),
        }
        for name, (a, b, c, mask) in wrong.items():
            _refuses(name, lambda a=a, b=b, c=c, mask=mask: module(a, b, c, key_mask=mask))
        _refuses("key_mask", lambda: module(q, k, v, key_mask=torch.ones(2, 9)))
        if case.kind.capabilities.cross and not case.causal:
            few = [q[:, :, :4], k, v]
            assert case.run(module, few).shape == (2, case.heads, 4, case.width), "cross-attention is declared"
            close(case.run(module, few), case.dense(module, few), 1e-9, "cross-attention")
        else:
            _refuses("length", lambda: module(q[:, :, :4], k, v))
    _refuses("no_such_option", lambda: case.make(no_such_option=1))
    _refuses("dropout", lambda: case.make(dropout=math.nan))
    _refuses("scale", lambda: case.make(scale=-1.0))


def _refuses(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except (TypeError, ValueError) as error:
        assert name in str(error), f"the error does not name {name}: {error}"
        return
    raise AssertionError(f"a wrong {name} was accepted")


CHECKS: dict[str, Callable[[Case], None]] = {
    check.__name__: check
    for check in (
        fast_equals_dense,
        weights_are_probabilities,
        causal_by_value_and_gradient,
        padding_is_invisible,
        no_state_between_calls,
        any_layout_and_dtype,
        compiles,
        copies_and_seeds,
        dropout_is_fair,
        grows_as_declared,
        bad_input_is_refused,
    )
}


def cases(spec: str, **options: Any) -> list[Case]:
    """The mechanism bidirectional and causal, as far as it declares them."""
    able = mechanism(split_spec(spec)[0]).capabilities
    wanted = [c for c, can in ((False, able.bidirectional), (True, able.causal)) if can]
    if "causal" in options:
        wanted = [options.pop("causal")]
    return [Case(spec, causal, options) for causal in wanted]


def check_attention(spec: str, *, only: Sequence[str] | None = None, **options: Any) -> None:
    """Run the contract against a mechanism, causal and bidirectional as it declares; raise ContractError.

        check_attention("strided:w=8")
        check_attention("my-mechanism", span=16, only=["fast_equals_dense"])

    `options` go to the mechanism. Exceptions are the mechanism's own: `exceptions = {check: reason}`.
    """
    unknown = set(only or ()) - set(CHECKS)
    if unknown:
        raise ValueError(f"only: no check is called {', '.join(sorted(unknown))} (checks: {', '.join(CHECKS)})")
    failures = []
    for case in cases(spec, **options):
        for name in only or CHECKS:
            problem = run_check(name, case)
            if problem:
                failures.append(f"{spec}{' causal' if case.causal else ''}, {name}: {problem}")
    if failures:
        raise ContractError("\n".join(failures))


def run_check(name: str, case: Case) -> str | None:
    """One check: None when it holds (or fails as declared), else what is wrong."""
    excused = case.kind.exceptions.get(name)
    try:
        CHECKS[name](case)
    except Exception as error:  # a crash is a failure of the contract like any other
        return None if excused else f"{type(error).__name__}: {error}"
    return f"is declared an exception ({excused}) but holds: take the declaration out" if excused else None
