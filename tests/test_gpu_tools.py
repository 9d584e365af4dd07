"""What is around the GPU kernels: doctor, builds ahead of time, the model of the time, devices of the contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from subquad.bench import Setting
from subquad.cli import app
from subquad.kernels import builds, devices
from subquad.studies import gpu_build, gpu_time
from subquad.testing import check_attention

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_a_choice_reaches_the_thread_of_a_backward_pass():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(devices.chosen).result() == "auto"
        with devices.use("aten"), devices.use("reference"):
            assert thread.submit(devices.chosen).result() == "reference"
        assert thread.submit(devices.chosen).result() == "auto"


def test_threads_that_choose_at_the_same_time_take_back_their_own_choice():
    first, second = devices.use("reference"), devices.use("aten")
    with first:
        second.__enter__()
    assert devices.chosen() == "aten"  # whoever came first has left first
    second.__exit__(None, None, None)
    assert devices.chosen() == "auto"


def test_doctor_names_a_kernel_for_every_operator():
    pytest.importorskip("triton", reason="triton is not installed")
    found = CliRunner().invoke(app, ["doctor", "--dtype", "float64"])
    assert found.exit_code == 0
    assert torch.__version__ in found.output
    for name in devices.OPERATORS:
        assert name in found.output
    assert "reference" in found.output and "triton " in found.output


@without_gpu
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="device='cuda': torch finds no GPU here"):
        check_attention("full", device="cuda")
    with pytest.raises(ValueError, match="device=cuda: torch finds no GPU here"):
        Setting(device="cuda")


def test_bench_refuses_unknown_devices_and_dtypes():
    with pytest.raises(ValueError, match="device must be cpu or cuda, not 'tpu'"):
        Setting(device="tpu")
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, not 'int8'"):
        Setting(dtype="int8")


def test_occupancy_follows_registers_and_shared_memory():
    assert gpu_build.occupancy("sm_80", 32, 0, 4) == 1.0
    assert gpu_build.occupancy("sm_80", 255, 0, 4) == 0.125  # 256 · 32 · 4 registers: two programs of 65536
    assert gpu_build.occupancy("sm_80", 32, 100 * 1024, 4) == 4 / 64  # one program's shared memory


def test_innermost_loops_are_found_in_machine_code():
    """Of NVIDIA and of AMD; a branch forwards is no loop, and a loop around another is not the innermost one."""
    nvidia = """
.L_x_0:
    /*0010*/  IADD3 R0, R0, 1 ;
.L_x_1:
    /*0020*/  @P0 BRA `(.L_x_2) ;
    /*0030*/  HMMA.16816.F32 R4, R8, R12, R4 ;
.L_x_2:
    /*0040*/  @P1 BRA `(.L_x_1) ;
    /*0050*/  @P2 BRA `(.L_x_0) ;
    /*0060*/  HMMA.16816.F32 R4, R8, R12, R4 ;
"""
    (loop,) = gpu_build.innermost_loops(nvidia)
    assert sum(bool(gpu_build.MATRIX.search(line)) for line in loop) == 1 and len(loop) == 5
    amd = ".LBB0_3:\n\tv_mfma_f32_32x32x8_f16 a[0:15], v[0:1], v[2:3], a[0:15]\n\ts_cbranch_scc1 .LBB0_3\n"
    assert len(gpu_build.innermost_loops(amd)) == 1


def test_builds_are_refused_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="TRITON_INTERPRET is set"):
        gpu_build.show(["sm_90"], ["float16"], [64], "", None)


def test_the_model_of_the_time():
    """Memory bounds little work, operations bound much; the tiles of a plan hold at least the pairs of a window."""
    gpu = gpu_time.Gpu(peak=1e12, bandwidth=1e9)
    assert gpu_time.predicted(gpu, 0, 1e6, 0, 1, 50, 1.0) == pytest.approx(0.1)
    assert gpu_time.predicted(gpu, 1e10, 1, 0, 1, 50, 0.5) == pytest.approx(4.0)
    pairs, rows, launches = gpu_time.visited("longformer:window=64", 1024, 64)
    assert 1024 * 33 <= pairs < 1024 * 1024 / 2 and rows > 4096 and launches == 1


def test_the_page_has_the_tables_of_the_builds():
    """docs/gpu-build.json is what `subquad study gpu-build --json docs/gpu-build.json` wrote."""
    docs = Path(__file__).parents[1] / "docs"
    found = gpu_build.read(docs / "gpu-build.json")
    assert gpu_build.markdown(found) in (docs / "gpu.md").read_text(encoding="utf-8")
    assert not any(row.stack for row in found)


@pytest.mark.slow
@pytest.mark.skipif(not devices.has_triton(), reason=devices.MISSING)
def test_kernels_build_without_spills(tmp_path):
    """In a process of its own: here kernels are interpreted."""
    file, environment = tmp_path / "builds.json", {**os.environ, "TRITON_INTERPRET": "0"}
    words = ["--targets", "sm_80,sm_90,sm_100", "--json", str(file)]
    subprocess.run([sys.executable, "-m", "subquad", "study", "gpu-build", *words], env=environment, check=True)
    found, entries = json.loads(file.read_text()), {entry.name: entry for entry in builds.entries()}
    assert len(found) == 3 * 2 * sum(len(entry.kinds) for entry in entries.values())
    for build in found:
        multiplies = entries[build["kernel"]].multiplies and build["dtype"] != "float32"  # that takes multiply-adds
        assert (build["matrix"] > 0) == multiplies, f"matrix instructions in the innermost loops: {build}"
        assert build["stack"] == 0, f"registers are spilled: {build}"
