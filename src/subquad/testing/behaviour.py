"""Checks of behaviour: no hidden state, any layout and dtype, compile, copies, dropout, refusals."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from subquad.testing.case import Case, Foreign, NotApplicable, close, gradient_names, gradients, masks


def no_state_between_calls(case: Case) -> None:
    """A short batch changes nothing for a later long one."""
    module = case.make()
    with torch.no_grad():
        first = case.run(module, case.inputs(65))
        for n in (1, 5, 129):
            case.run(module, case.inputs(n, batch=3))
        assert torch.equal(case.run(module, case.inputs(65)), first), "the same call gives another result later"


def leaves_no_trace(case: Case) -> None:
    """A call, in training too, writes no attribute and no buffer; gradient checkpointing changes nothing."""
    module = case.make(dropout=0.2).train()
    before, state = _attributes(module), {key: x.clone() for key, x in _tensors(module).items()}
    xs = [x.requires_grad_() for x in case.inputs(33)]
    out = case.run(module, xs)
    grads = gradients(out, xs, module)
    assert _attributes(module) == before, f"a call writes attributes: {_changed(before, _attributes(module))}"
    for key, x in _tensors(module).items():
        assert torch.equal(x, state[key]), f"a call changes {key}"
    again = checkpoint(lambda *ys: case.run(module, ys), *xs, use_reentrant=False)
    close(again, out, 1e-12, "gradient checkpointing: value")
    pairs = zip(gradient_names(case, module), gradients(again, xs, module), grads, strict=True)
    for name, a, b in pairs:
        close(a, b, 1e-12, f"gradient checkpointing: gradient of {name}")


def batch_is_its_parts(case: Case) -> None:
    """A batch in two parts, as accumulation and several processes have it, gives the same values and gradients."""
    if case.able.stochastic:
        raise NotApplicable  # each batch element draws for itself, by its number in the batch
    module = case.make()
    xs = [x.requires_grad_() for x in case.inputs(17, batch=10)]
    whole = case.run(module, xs)
    parts = [case.run(module, [x[a:b] for x in xs]) for a, b in ((0, 3), (3, 10))]
    close(torch.cat(parts), whole, 1e-12, "value of a batch in two parts")
    pairs = zip(gradients(torch.cat(parts), xs, module), gradients(whole, xs, module), strict=True)
    for name, (a, b) in zip(gradient_names(case, module), pairs, strict=True):
        close(a, b, 1e-9, f"gradient of {name} of a batch in two parts")
    if case.is_layer:
        return
    module.train()
    records = [module.observe(*ys)[1] for ys in (xs, [x[:2] for x in xs], [x[2:] for x in xs])]
    if records[0].statistics is not None:
        close(records[1].statistics + records[2].statistics, records[0].statistics, 1e-9, "statistics of two parts")


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What every submodule's __dict__ holds, by identity, and what lies in the containers there."""
    return {
        f"{name}.{key}": _identity(value) for name, part in module.named_modules() for key, value in vars(part).items()
    }


def _identity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _identity(item) for key, item in value.items()}
    return [id(item) for item in value] if isinstance(value, list | set) else id(value)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, also those that the state dict does not have."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    return ", ".join(sorted(k.strip(".") for k in before.keys() | after.keys() if before.get(k) != after.get(k)))


def any_layout_and_dtype(case: Case) -> None:
    """Non-contiguous inputs, half precision, large magnitudes, gradients for only some inputs."""
    module = case.make()
    xs = case.inputs(33)
    base = case.run(module, xs)
    strange = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in xs]
    close(case.run(module, strange), base, 1e-12, "non-contiguous inputs")
    wide = [torch.cat([x, x], case.time)[(slice(None),) * case.time + (slice(0, 33),)] for x in xs]
    close(case.run(module, wide), base, 1e-12, "inputs that are slices")
    one = [x[:1].expand_as(x) for x in xs]
    close(case.run(module, one), case.run(module, [x.contiguous() for x in one]), 1e-12, "inputs that are expanded")
    for dtype in (torch.bfloat16, torch.float16):
        half = case.run(case.make(dtype), case.inputs(33, dtype))
        assert half.dtype == dtype, f"{dtype} in, {half.dtype} out"
        assert half.isfinite().all(), f"{dtype}: not finite"
        if not case.able.stochastic:  # rounding moves the edges that are sampled
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
    for chosen, name in enumerate(case.names):
        some = [x.detach().clone().requires_grad_(index == chosen) for index, x in enumerate(xs)]
        every = [x.detach().clone().requires_grad_() for x in xs]
        alone, whole = (gradients(case.run(module, ys), [ys[chosen]])[0] for ys in (some, every))
        close(alone, whole, 1e-12, f"gradient of {name} alone")


def modes_agree(case: Case) -> None:
    """Without gradients, and in training without dropout, the values are those of evaluation."""
    module, xs = case.make(), case.inputs(33)
    base = case.run(module, [x.clone().requires_grad_() for x in xs])
    with torch.no_grad():
        close(case.run(module, xs), base, 1e-12, "value without gradients (torch.no_grad)")
        if not case.able.stochastic and not isinstance(case, Foreign):  # whose dropout is its own business
            close(case.run(module.train(), xs), base, 1e-12, "value in training, without dropout")


def compiles(case: Case, any_length: bool | None = None) -> None:
    """torch.compile(fullgraph=True) captures one graph that gives eager's values and gradients.

    The second length is captured as a symbol, for any length. That takes most of the time of the whole contract, so a
    mechanism that has both directions is captured for any length in one of them, unless `any_length` says otherwise.
    Captured without a compiler behind it: `torch.library.opcheck` looks after what compilers ask of the operators.
    """
    module = case.make(torch.float32)
    torch._dynamo.reset()
    if any_length is None:
        any_length = not (case.causal and case.able.bidirectional)
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=None if any_length else False)
    for n, padded in ((9, True), (33, False)):
        mask = masks(n)[:2] if padded and case.able.padding else None
        xs = [x.requires_grad_() for x in case.inputs(n, torch.float32)]
        eager, graph = case.run(module, xs, mask), case.run(compiled, xs, mask)
        close(graph, eager, 1e-5, f"compiled value at n={n}")
        grads = zip(gradients(graph, xs, module), gradients(eager, xs, module), strict=True)
        for name, (a, b) in zip(gradient_names(case, module), grads, strict=True):
            close(a, b, 1e-5, f"compiled gradient of {name} at n={n}")
    torch._dynamo.reset()


def copies_and_seeds(case: Case) -> None:
    """state_dict, pickle and deepcopy round trips; a result follows from the inputs and the seed alone."""
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
    if not case.able.stochastic:
        assert torch.equal(case.run(module, xs, seed=5), base), (
            "two calls with the same inputs differ: a call draws from torch's generator"
        )
    _leaves_the_generator(case)


def _leaves_the_generator(case: Case) -> None:
    """A call that has a seed, or needs none, draws nothing from torch's generator, forward or backward."""
    modules: dict[str, tuple[Any, dict[str, Any]]] = {}
    if not case.able.stochastic:
        modules["in evaluation"] = case.make(), {}
    if not (case.is_layer or isinstance(case, Foreign)):  # which take no seed
        modules["with a seed"] = case.make(dropout=0.2).train(), {"seed": torch.tensor(7)}
    for what, (module, about) in modules.items():
        xs = [x.requires_grad_() for x in case.inputs(33)]
        before = torch.get_rng_state()
        out = case.call(module, xs, **about)
        gradients(out, xs, module)
        assert torch.equal(torch.get_rng_state(), before), f"a call {what} draws from torch's generator"


def dropout_is_fair(case: Case) -> None:
    """Dropout acts in training only, follows the seed and keeps the mean."""
    copies = 1024
    module = case.make(dropout=0.3)
    one = case.inputs(7, batch=1)
    many = [x.repeat_interleave(copies, 0) for x in one]
    base = case.run(case.make(), one)
    if not case.able.stochastic:
        close(case.run(module, one), base, 1e-12, "dropout in evaluation")
    module.train()
    with torch.no_grad():
        first = case.run(module, many)
        assert torch.equal(first, case.run(module, many)), "dropout does not follow the seed"
        if not case.is_layer:
            assert not torch.equal(first, base.expand_as(first)), "dropout=0.3 changes nothing in training"
            pair = [module(*one, seed=torch.tensor(7)) for _ in range(2)]  # torch's generator moves on between them
            assert torch.equal(*pair), "dropout does not follow the `seed` of the call"
            pair = [module(*(x[:8] for x in many), seed=torch.tensor(seed)) for seed in (7, 8)]
            assert not torch.equal(*pair), "every `seed` drops the same weights"
        if case.able.stochastic:
            return
        assert first.std(0).max() > 0.01, "dropout drops nothing"
        error, spread = (first.mean(0) - base[0]).abs(), first.std(0) / math.sqrt(copies)
        assert (error <= 6 * spread + 1e-9).all(), (
            f"dropout moves the mean by {(error / spread).max():.1f} standard errors"
        )


def bad_input_is_refused(case: Case) -> None:
    """Wrong shapes, masks, lengths and options raise, and the message names the argument."""
    module = case.make()
    if case.is_layer:
        (x,) = case.inputs(9)
        refuses("query", lambda: module(x[..., :-1], x, x))
        refuses("key_padding_mask", lambda: module(x, x, x, key_padding_mask=torch.zeros(2, 8, dtype=torch.bool)))
    else:
        q, k, v = case.inputs(9)
        wrong = {
            "q": (q[0], k, v, None),
            "k": (q, k.repeat(1, 2, 1, 1), v, None),
            "v": (q, k, v[..., :-1], None),
            "key_mask": (q, k, v, torch.ones(2, 8, dtype=torch.bool)),
        }
        for name, (a, b, c, mask) in wrong.items():
            refuses(name, lambda a=a, b=b, c=c, mask=mask: module(a, b, c, key_mask=mask))
        refuses("key_mask", lambda: module(q, k, v, key_mask=torch.ones(2, 9)))
        if case.able.cross and not case.causal:
            few = [q[:, :, :4], k, v]
            assert case.run(module, few).shape == (2, case.heads, 4, case.width), "cross-attention is declared"
            close(case.run(module, few), case.dense(module, few), 1e-9, "cross-attention")
        else:
            refuses("length", lambda: module(q[:, :, :4], k, v))
    refuses("no_such_option", lambda: case.make(no_such_option=1))
    refuses("dropout", lambda: case.make(dropout=math.nan))
    refuses("scale", lambda: case.make(scale=-1.0))


def refuses(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except (TypeError, ValueError) as error:
        assert name in str(error), f"the error does not name {name}: {error}"
        return
    raise AssertionError(f"a wrong {name} was accepted")
