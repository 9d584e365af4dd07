"""Every mechanism and every model on a GPU that is not there: shapes, dtypes, devices, and nothing moves to the CPU.

Reading a value of a tensor without contents raises, so a trace that ends has never waited for the device. Backward
passes are traced operator by operator (`test_gpu_merge`): without CUDA autograd has no thread for such a device.
"""

from __future__ import annotations

import pytest
import torch

import subquad
from fake_gpu import fake_gpu, on_fake_gpu
from subquad.attention.registry import mechanism
from subquad.kernels import devices
from subquad.models import HEADS, SubquadConfig

N, WIDTH = 70, 32


@pytest.fixture(autouse=True)
def without_triton(monkeypatch):
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    monkeypatch.setattr(devices, "_say_once", lambda *about: None)


def directions(name: str) -> list[bool]:
    can = mechanism(name).capabilities
    return [causal for causal, possible in ((True, can.causal), (False, can.bidirectional)) if possible]


def trace(name: str, causal: bool, options: dict) -> None:
    about = {"causal": causal, "max_length": 128, "batch_first": True}
    layer = subquad.MultiheadAttention(WIDTH, 4, attention=name, **about, **options)
    with fake_gpu() as moves, torch.no_grad():
        x = torch.empty(2, N, WIDTH, device="cuda")
        out, _ = on_fake_gpu(layer)(x, x, x, need_weights=False)
        assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
        assert moves.operators and not moves.found, f"{moves.found} move to the CPU"


@pytest.mark.parametrize("name", subquad.available())
def test_a_mechanism_stays_on_the_device(name):
    trace(name, directions(name)[0], mechanism(name).examples[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", subquad.available())
def test_a_mechanism_stays_on_the_device_with_every_example(name):
    for causal in directions(name):
        for options in mechanism(name).examples:
            trace(name, causal, options)


@pytest.mark.parametrize("head", sorted(HEADS))
def test_a_model_stays_on_the_device(head):
    config = SubquadConfig(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=128,
        attention="combiner-fixed:span=8", pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    model = HEADS[head](config).eval()  # the statistics of a batch norm would ask the driver
    with fake_gpu() as moves, torch.no_grad():
        ids = torch.zeros(2, N, dtype=torch.long, device="cuda")
        more = {"seq2seq": {"decoder_input_ids": ids}, "pair": {"pair_ids": ids}}.get(head, {})
        logits = on_fake_gpu(model)(ids, **more).logits
        assert logits.device.type == "cuda" and logits.shape[0] == 2
        assert not moves.found, f"{moves.found} move to the CPU"
