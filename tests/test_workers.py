"""Kernels that are called by their addresses: their arguments arrive, and compiling is announced once."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from subquad.kernels.parallel import Announcement, Workers, launch


@Workers
def collect(worker, workers, arguments):
    values, (first, second), number, real, big, out = arguments[0]
    for i in range(worker, len(values), workers):
        out[i, 0] = values[i] * real + first[i % len(first), 1]
        out[i, 1] = second + number
        out[i, 2] = np.float64(big >> np.uint64(32))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("step", [1, 2])
def test_arguments_arrive(kind, step):
    values = np.arange(20, dtype=kind)[::step]
    first, out = np.arange(6).reshape(3, 2), np.zeros((len(values), 3))
    with launch() as workers:
        collect(workers, values, (first, -7), 4, 0.5, np.uint64(2**63), out)
    np.testing.assert_array_equal(out[:, 0], values * 0.5 + first[np.arange(len(values)) % 3, 1])
    np.testing.assert_array_equal(out[:, 1:], np.tile([-3.0, 2.0**31], (len(values), 1)))
    before = out.copy()
    collect.run(values, (first, -7), 4, 0.5, np.uint64(2**63), out)
    np.testing.assert_array_equal(out, before)


def test_compiling_is_announced_once(caplog):
    def event(module):
        return SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=SimpleNamespace(__module__=module))})

    announcement = Announcement()
    with caplog.at_level(logging.WARNING, "subquad"):
        announcement.on_start(event("somebody.else"))
        assert not caplog.records
        for _ in range(2):
            announcement.on_start(event("subquad.kernels.edges.loops"))
    assert len(caplog.records) == 1
    assert "Numba's cache" in caplog.records[0].getMessage()
