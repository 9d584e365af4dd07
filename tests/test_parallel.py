"""Numba kernels under Python threads and in forked workers, each in a process of its own: a fault would end it."""

import os
import subprocess
import sys

import pytest

# The last loop: when a thread that has run a backward ends, torch 2.12 takes Python's lock once more, after `join` has
# returned, and aborts the process if the interpreter is ending by then. torch 2.13 keeps nothing that would need it.
THREADS = """
import os, threading, time, torch, subquad
torch.set_num_threads(2)
wrong = []

def work(seed):
    try:
        for name in ("sbm", "combiner-routing", "routing"):
            a = subquad.attention(name, num_heads=2, head_dim=8, clusters=4)
            xs = [torch.randn(2, 2, 150, 8, requires_grad=True) for _ in range(3)]
            for _ in range(4):
                a(*xs, seed=torch.tensor(seed)).sum().backward()
    except BaseException as error:
        wrong.append(error)

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
while any(os.path.exists(f"/proc/self/task/{t.native_id}") for t in threads):
    time.sleep(0.01)
import numba
print("failed" if wrong else "finished", numba.threading_layer(), *wrong)
"""

FORK = """
import warnings, torch, subquad
warnings.simplefilter("ignore")
a = subquad.attention("sbm", num_heads=2, head_dim=8, clusters=4, exploration=0.0)
xs = [torch.randn(1, 2, 150, 8) for _ in range(3)]
seed = torch.tensor(0)
here = a(*xs, seed=seed).detach()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return a(*xs, seed=seed).detach()

try:
    for batch in torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="fork"):
        print("equal" if torch.allclose(batch[0], here, atol=1e-6) else "different")
except RuntimeError as error:
    print("refused:", "spawn" in str(error) and "forked after subquad's CPU kernels" in str(error))
"""


def run(code: str, layer: str) -> str:
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": paths, "NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": "2"}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert child.returncode == 0, f"ended with {child.returncode}: {child.stderr[-1000:]}"
    return child.stdout


@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_several_threads_may_call_at_once(layer):
    assert run(THREADS, layer).split() == ["finished", layer]


def test_a_forked_worker_computes_or_says_what_to_do():
    assert run(FORK, "workqueue").split() == ["equal"] * 2
    assert run(FORK, "omp").split() == ["refused:", "True"]
