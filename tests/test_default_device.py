"""Tensors of the CPU are attended to on the CPU, whatever torch's default device is; a module is made where that says.

"meta" stands for a GPU here: nothing of it has an address or can be read.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import subquad
from subquad.attention.registry import mechanism
from subquad.testing import cases
from subquad.testing.case import close, gradients, masks
from subquad.testing.streaming import make, one_call, stream

# Sets of one's own are made where the user's function makes them.
NAMES = [name for name in subquad.available() if mechanism(name).python_only != "sets"]


@pytest.mark.parametrize("name", NAMES)
def test_another_default_device_changes_nothing(name):
    for case in cases(name, **mechanism(name).examples[0]):
        for dropout in (0.0, 0.3):
            module, mask = case.make(dropout=dropout).train(dropout > 0), masks(17) if case.able.padding else None
            xs = [x.requires_grad_() for x in case.inputs(17, batch=5)]
            want = case.run(module, xs, mask)
            wanted = gradients(want, xs, module)
            with torch.device("meta"):
                found = case.run(module, xs, mask)
                grads = gradients(found, xs, module)
            for x, y in zip((found, *grads), (want, *wanted), strict=True):
                close(x, y, 1e-12, f"{case.title}, dropout={dropout}")


@pytest.mark.parametrize("name", ["strided", "random", "combiner-window", "sbm", "moba"])
def test_streaming_under_another_default_device(name):
    for case in cases(name, causal=True, **mechanism(name).examples[0]):
        module, xs, seed = make(case), case.inputs(33), torch.tensor(5)
        with torch.no_grad():
            want = one_call(case, module, xs, None, seed)
            with torch.device("meta"):
                found, _ = stream(case, module, xs, (20, 1, 12), seed=seed)
        close(found, want, 1e-9, case.title)


@pytest.mark.parametrize("name", subquad.available())
def test_a_module_is_made_on_the_default_device(name):
    case = replace(cases(name, **mechanism(name).examples[0])[0], device="meta")  # where `make` sends it in the end
    with torch.device("meta"):
        module = case.make()
    assert all(x.is_meta for x in (*module.parameters(), *module.buffers()))
