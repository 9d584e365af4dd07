"""Every registered mechanism passes every check of the contract."""

import pytest
import torch

import subquad
from subquad.attention.registry import mechanism
from subquad.testing import CHECKS, Case, cases, run_check


def window_and_relay(n):
    """The user's own sets for the mechanism `pattern`."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    return ((i - j).abs() <= 2) | (j == 0)


def eights(n):
    """A plan of the user's own for `combiner-plan`: eight tokens directly, the others in groups of 64."""
    spans = [range(a, min(a + 8, n)) for a in range(0, n, 8)]
    return [spans[i // 8] for i in range(n)], [
        [span for a, span in enumerate(spans) if a != i // 8 and a // 8 == i // 64]
        + [range(b, min(b + 64, n)) for b in range(0, n, 64) if b // 64 != i // 64]
        for i in range(n)
    ]


VARIANTS = {
    "full": [{}, {"map": "entmax"}, {"map": "topk", "topk": 3}],
    "strided": [
        {},
        {"w": 4, "heads": "union"},
        {"w": 4, "heads": "multihead"},
        {"layer_index": 1, "map": "sparselin-gen"},
    ],
    "fixed": [{}, {"w": 5, "layer_index": 1}, {"w": 5, "heads": "union", "close": True}],
    "star": [{}, {"w": 2, "relay": "first"}],
    "random": [{}, {"density": 0.5, "seed": 3}],
    "longformer": [{"window": 7}, {"window": 8, "global_tokens": 3}],
    "bigbird": [{}, {"block": 4, "random_blocks": 2, "global_blocks": 1}],
    "logsparse": [{}],
    "axial": [{}, {"cols": 5, "heads": "multihead"}],
    "pattern": [{"sets": window_and_relay}],
    "combiner-plan": [{"plan": eights}],
    "combiner-axial": [{}, {"plan": "horizontal", "cols": 5}, {"plan": "rowmajor", "abstraction": "deepsets-mean"}],
    "combiner-mixture": [{}, {"joint": True, "split": True}],
    "sbm": [{}, {"ste": "difference", "window": 5}],
    "composite-slice": [
        {},
        {"slice_length": 8, "extension": 2.0, "positions": "ms-vipe", "max_length": 16384},
        {"slice_length": 8, "levels": 3, "composition": "global-local", "pool": "linear", "share_weights": False},
    ],
}


SAME_FOR_EVERY_OPTION = {
    "any_layout_and_dtype",
    "compiles",
    "copies_and_seeds",
    "no_state_between_calls",
    "grows_as_declared",
    "bad_input_is_refused",
    "dropout_is_fair",
}


def all_cases():
    """Every check for every mechanism; for its further variants those that options can break."""
    for name in subquad.available():
        for index, options in enumerate(VARIANTS.get(name, mechanism(name).examples)):
            text = ",".join(f"{k}={v}" for k, v in options.items() if not callable(v))
            for case in cases(name, **options):
                for check in CHECKS:
                    if index == 0 or check not in SAME_FOR_EVERY_OPTION:
                        label = f"{name}:{text}{'-causal' if case.causal else ''}-{check}"
                        yield pytest.param(check, case, id=label)


@pytest.mark.parametrize(("check", "case"), list(all_cases()))
def test_contract(check: str, case: Case):
    assert run_check(check, case) is None
