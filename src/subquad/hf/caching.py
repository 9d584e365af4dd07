"""Caches of decoding: a converted layer keeps the state of its mechanism in place of keys and values."""

from __future__ import annotations

from transformers import PreTrainedModel


def install_states(model: PreTrainedModel) -> None:
    """Placeholder until states exist."""
