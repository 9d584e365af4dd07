"""The contract as a tool: `check_attention("my-mechanism")` runs every check against a mechanism.

Each check is a function of a `Case` (one mechanism, causal or not, with its options) that raises AssertionError. A
mechanism that cannot pass one declares it, `exceptions = {"check name": "reason"}`; the declaration is strict: an
exception that no longer fails is an error. With pytest:

    @subquad.testing.parametrize_with_checks("my-mechanism")
    def test_contract(check):
        check()
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from subquad.attention.base import Capabilities
from subquad.attention.registry import mechanism
from subquad.core.options import split_spec
from subquad.testing.behaviour import (
    any_layout_and_dtype,
    bad_input_is_refused,
    batch_is_its_parts,
    compiles,
    copies_and_seeds,
    dropout_is_fair,
    leaves_no_trace,
    modes_agree,
    no_state_between_calls,
)
from subquad.testing.case import Case, Foreign, NotApplicable
from subquad.testing.cost import grows_as_declared
from subquad.testing.exactness import (
    fast_equals_dense,
    grouped_heads,
    other_sizes,
    scale_is_used,
    weights_are_probabilities,
)
from subquad.testing.long import long_equals_dense, long_is_causal, long_padding_is_invisible
from subquad.testing.masking import (
    causal_by_value_and_gradient,
    nan_stays_where_it_is,
    padded_row_equals_alone,
    padding_is_invisible,
)
from subquad.testing.streaming import (
    state_grows_as_declared,
    state_is_a_value,
    streaming_refuses_bad_input,
    streams_in_any_split,
)

__all__ = ["CHECKS", "ContractError", "cases", "check_attention", "parametrize_with_checks", "run_check"]


class ContractError(AssertionError):
    """The parts of the contract that a mechanism violates, one line per check."""


CHECKS: dict[str, Callable[[Any], None]] = {
    check.__name__: check
    for check in (
        fast_equals_dense,
        long_equals_dense,
        scale_is_used,
        other_sizes,
        weights_are_probabilities,
        grouped_heads,
        causal_by_value_and_gradient,
        long_is_causal,
        padding_is_invisible,
        padded_row_equals_alone,
        long_padding_is_invisible,
        nan_stays_where_it_is,
        no_state_between_calls,
        leaves_no_trace,
        batch_is_its_parts,
        modes_agree,
        any_layout_and_dtype,
        compiles,
        copies_and_seeds,
        dropout_is_fair,
        grows_as_declared,
        bad_input_is_refused,
        streams_in_any_split,
        state_is_a_value,
        state_grows_as_declared,
        streaming_refuses_bad_input,
    )
}

# What does not depend on the options of a mechanism is checked with the first of its examples only.
ONCE = {
    "any_layout_and_dtype",
    "bad_input_is_refused",
    "batch_is_its_parts",
    "compiles",
    "copies_and_seeds",
    "dropout_is_fair",
    "grows_as_declared",
    "leaves_no_trace",
    "long_equals_dense",
    "long_is_causal",
    "long_padding_is_invisible",
    "modes_agree",
    "no_state_between_calls",
    "other_sizes",
    "state_grows_as_declared",
    "state_is_a_value",
    "streaming_refuses_bad_input",
}


def cases(spec: str, device: str = "cpu", **options: Any) -> list[Case]:
    """The mechanism bidirectional and causal, as far as it declares them."""
    able = mechanism(split_spec(spec)[0]).capabilities
    wanted = [c for c, can in ((False, able.bidirectional), (True, able.causal)) if can]
    if "causal" in options:
        wanted = [options.pop("causal")]
    return [Case(spec, causal, options, device=device) for causal in wanted]


def every_check(spec: str, device: str = "cpu", **options: Any) -> Iterator[tuple[str, Case]]:
    """(check, case): all checks with the options given or the first example of the class; with its other examples
    those that options can break.
    """
    chosen = ":" in spec or set(options) - {"causal"}
    for number, example in enumerate([{}] if chosen else mechanism(spec).examples):
        for case in cases(spec, device, **{**example, **options}):
            yield from ((check, case) for check in CHECKS if number == 0 or check not in ONCE)


def parametrize_with_checks(*specs: str) -> Callable:
    """A pytest decorator: one test per check, example and direction; the test gets a function that runs the check."""
    import pytest

    def bound(check: str, case: Case) -> Callable[[], None]:
        def run() -> None:
            problem = run_check(check, case)
            if problem:
                raise ContractError(problem)

        return run

    pairs = [pair for spec in specs for pair in every_check(spec)]
    params = [pytest.param(bound(check, case), id=f"{case.title}-{check}") for check, case in pairs]
    return pytest.mark.parametrize("check", params)


def check_attention(
    spec: str | Callable[[bool], Any],
    *,
    only: str | Sequence[str] | None = None,
    definition: Callable[..., Any] | None = None,
    capabilities: Capabilities | None = None,
    progress: bool | None = None,
    device: str = "cpu",
    **options: Any,
) -> None:
    """Run the contract against a mechanism, causal and bidirectional as it declares; raise ContractError.

        check_attention("strided:w=8")
        check_attention("my-mechanism", span=16, only=["fast_equals_dense"])
        check_attention(lambda causal: MyModule(2, 8, causal), definition=dense)

    `options` are passed to the mechanism; if neither they nor the spec give any, the `examples` of its class are
    checked. Exceptions are declared on its class: `exceptions = {check: reason}`. A module that is not registered is
    given as a function causal → module(q, k, v, key_mask=None) for 2 heads of width 8 and up to 1,000 tokens, with its
    `definition(q, k, v, key_mask, causal)` → output and what it supports (`capabilities`). `progress` prints a line per
    check on standard error (default: on a terminal), with – where a check does not apply. device="cuda" runs the checks
    on a GPU.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch finds no GPU here (subquad doctor shows what it finds)")
    only = [only] if isinstance(only, str) else only
    unknown = set(only or ()) - set(CHECKS)
    if unknown:
        raise ValueError(f"only: no check is called {', '.join(sorted(unknown))} (checks: {', '.join(CHECKS)})")
    if not isinstance(spec, str) and not callable(spec):
        raise TypeError(f"spec must be a text such as 'strided:w=8', or a function causal → module, not {spec!r}")
    if callable(spec):
        if definition is None:
            raise ValueError(
                "definition is needed for a module that is not registered: (q, k, v, key_mask, causal) → out"
            )
        foreign = Foreign.cases(spec, definition, capabilities or Capabilities(), device)
        pairs: Iterable[tuple[str, Any]] = [(name, case) for case in foreign for name in CHECKS]
    else:
        pairs = every_check(spec, device, **options)
    failures: dict[tuple[str, str], list[str]] = {}  # the checks that fail in the same way
    for name, case in pairs:
        if name in case.cannot if only is None else name not in only:
            continue
        started = time.perf_counter()
        outcome, problem = _outcome(name, case)
        if progress if progress is not None else sys.stderr.isatty():
            took = "" if outcome == "–" else f"{time.perf_counter() - started:.1f} s"
            print(f"{outcome:6}{took:>8}  {case.title}, {name}", file=sys.stderr)
        if problem:
            failures.setdefault((case.title, problem), []).append(name)
    if failures:
        raise ContractError("\n".join(f"{title}, {_several(n)}: {problem}" for (title, problem), n in failures.items()))


def _several(names: list[str]) -> str:
    """A mechanism that cannot be created fails every check in the same way: it is told once."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more checks"


def run_check(name: str, case: Any) -> str | None:
    """One check: None when it holds (or fails as declared, or does not apply), else what is wrong."""
    return _outcome(name, case)[1]


def _outcome(name: str, case: Any) -> tuple[str, str | None]:
    """ "ok", "FAILS", or "–" where the check does not apply; and what is wrong."""
    excused = case.exceptions.get(name)
    try:
        with nullcontext() if case.device == "cpu" else torch.device(case.device):  # for what a check makes itself
            CHECKS[name](case)
    except NotApplicable:
        return "–", None
    except Exception as error:  # a crash is a failure of the contract like any other
        return ("ok", None) if excused else ("FAILS", f"{type(error).__name__}: {error}")
    if excused:
        return "FAILS", f"is declared an exception ({excused}) but holds: take the declaration out"
    return "ok", None
