"""What the models return. `density`, `auxiliary_loss` and `statistics` are the records of the layers' mechanisms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.utils import ModelOutput, can_return_tuple

from subquad.models.attention import Record


class BlockOutput(NamedTuple):
    """A flat tuple, the record spread out: reentrant gradient checkpointing sees tensors of the first level only."""

    states: Tensor  # (B, n, D)
    weights: Tensor | None = None  # (B, H, n, n)
    cross_weights: Tensor | None = None  # (B, H, n, m)
    density: Tensor | None = None  # (H,)
    auxiliary_loss: Tensor | None = None
    statistics: Tensor | None = None


@dataclass
class BackboneOutput(ModelOutput):
    """`density` (layers, heads), the mean `auxiliary_loss` and `statistics` per layer, of the layers that have any."""

    last_hidden_state: Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    density: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    statistics: tuple[Tensor | None, ...] | None = None


@dataclass
class Scores(ModelOutput):
    """What every head returns, and the records of the backbone."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    density: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    statistics: tuple[Tensor | None, ...] | None = None


@dataclass
class Seq2SeqScores(ModelOutput):
    """What the encoder–decoder returns; the records are those of the encoder's layers, then those of the decoder's."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Cache | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None
    density: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    statistics: tuple[Tensor | None, ...] | None = None


def collect(records: Sequence[Record | BlockOutput]) -> dict[str, Any]:
    """The records of all layers as fields of an output."""
    density = [record.density for record in records if record.density is not None]
    auxiliary = [record.auxiliary_loss for record in records if record.auxiliary_loss is not None]
    statistics = tuple(record.statistics for record in records)
    return {
        "density": torch.stack(density) if density else None,  # (layers, H)
        "auxiliary_loss": torch.stack(auxiliary).mean() if auxiliary else None,
        "statistics": None if all(one is None for one in statistics) else statistics,
    }


def returns_output(forward: Callable[..., Any], unseen: tuple[str, ...] = ()) -> Any:
    """`forward` also takes `return_dict`: False is a tuple, None what the configuration says.

    The signature says so too, for those who bind arguments to it before they call (transformers' exporters do). It
    leaves out `unseen`: Trainer evaluates a loss only if a batch has everything that is called a label there.
    """
    wrapped: Any = can_return_tuple(forward)
    own = inspect.signature(forward)
    shown = [parameter for name, parameter in own.parameters.items() if name not in unseen]
    choice = inspect.Parameter("return_dict", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="bool | None")
    wrapped.__signature__, wrapped.unseen = own.replace(parameters=[*shown, choice]), unseen
    return wrapped
