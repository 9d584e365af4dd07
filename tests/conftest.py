"""What all tests share: strict settings, and where real data sets are looked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin starve the other workers
os.environ.setdefault("TRITON_INTERPRET", "1")  # before torch, which imports triton: kernels are interpreted
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what triton does anyway, and warns about

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(max(1, (os.cpu_count() or 2) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
settings.register_profile("quick", deadline=None, max_examples=15, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=200, print_blob=True)  # fresh seeds every time
settings.load_profile("quick")  # --hypothesis-profile chooses another one

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `make test &`: tests that press Ctrl-C would fail
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the Numba kernels before the workers start, which then find them in the cache; each dtype on a core."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        return
    command = [sys.executable, str(Path(__file__).parent / "compiled.py")]
    started = [subprocess.Popen([*command, dtype]) for dtype in ("float32", "float64")]
    for process in started:
        process.wait()  # what fails here fails in a test, too


ROOT = Path(__file__).parents[1]
PLACES = [os.environ.get("SUBQUAD_DATA"), ROOT / "data", ROOT.parent / "data", ROOT.parent / "shared" / "data"]


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory of real data sets; tests that need it are skipped where there is none."""
    for place in PLACES:
        if place and (Path(place) / "README.md").exists():
            return Path(place)
    pytest.skip("no real data sets here: SUBQUAD_DATA names their directory")
