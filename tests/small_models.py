"""Small models and batches for the tests of the models."""

from __future__ import annotations

import torch

from subquad.models import SubquadConfig

# the attentions that transformers' own tests are run with, one of every kind; sampled ones repeat themselves
FIVE = ["full", "combiner-fixed:span=4", "longformer:window=4", "composite-slice:slice_length=4", "sbm:clusters=4"]
LENGTH = 12


def config(**keys) -> SubquadConfig:
    small = {"vocab_size": 20, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
    return SubquadConfig(**{**small, **ids, "max_position_embeddings": 32, "num_labels": 3, **keys})


def inputs(head: str, n: int = LENGTH, rows: int = 2) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 20, (rows, n), generator=draw)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if head == "pair":
        return {**found, "pair_ids": ids.flip(1)}
    return {**found, "decoder_input_ids": ids[:, : n // 2]} if head == "seq2seq" else found


def labels(head: str, n: int = LENGTH) -> torch.Tensor:
    if head in ("sequence", "pair"):
        return torch.tensor([0, 2])
    return torch.arange(2 * n).view(2, n)[:, : n // 2 if head == "seq2seq" else n] % 3
