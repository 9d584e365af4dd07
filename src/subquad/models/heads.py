"""The models: the backbone with a head for each kind of task, and the loss that trains it.

A head's loss is cross-entropy (mean squared error for one label), plus λ · density where SBM layers ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.utils import ModelOutput

from subquad.models.config import SubquadConfig
from subquad.models.encoder import SubquadModel, SubquadPreTrainedModel

IGNORED = -100  # a label that does not count


@dataclass
class Scores(ModelOutput):
    """What every head returns; `density` (layers, heads) where SBM layers were asked."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    density: Tensor | None = None


class Head(SubquadPreTrainedModel):
    """The backbone, causal or not, and a linear map. A kind of head says which logits and which loss."""

    causal: ClassVar[bool] = False

    def __init__(self, config: SubquadConfig) -> None:
        config.is_decoder = self.causal
        super().__init__(config)
        self.encoder = SubquadModel(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> Scores:
        states = self.encoder(
            input_ids, attention_mask, position_ids, token_type_ids, inputs_embeds, output_hidden_states
        )
        logits = self.score(states.last_hidden_state, attention_mask)
        loss = None if labels is None else self.with_density(self.loss(logits, labels))
        output = Scores(loss, logits, states.hidden_states, self.density())
        return output if return_dict else output.to_tuple()

    def score(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of the labels that count, smoothed in training."""
        return cross_entropy(logits, labels, self.config.label_smoothing if self.training else 0.0)


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean over the labels that count; 0 where none does, so that an all-padding batch trains nothing."""
    check_labels(labels, logits.shape[-1])
    logits, labels = logits.flatten(0, -2).float(), labels.flatten()
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    return total / (labels != IGNORED).sum().clamp(min=1)


def check_labels(labels: Tensor, classes: int) -> None:
    """torch aborts on a label out of range, or reads past the end: say which one it is."""
    if torch.compiler.is_compiling():
        return
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= classes))
    if bool(wrong.any()):
        raise ValueError(f"label {labels[wrong][0].item()} is out of range: labels go from 0 to {classes - 1}")


class SubquadForCausalLM(Head, GenerationMixin):
    """Predicts the next token. Labels are the input ids; the shift happens here. `generate` runs without a cache."""

    causal = True
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "encoder.embeddings.tokens.weight"}

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.lm_head = _linear(config, config.vocab_size, bias=False)
        self.post_init()

    def score(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.lm_head(states)  # (B, n, V)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits[:, :-1], labels[:, 1:])

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask=None, **unused: Any) -> dict[str, Any]:
        """The whole sequence at every step: right for every mechanism, and not yet cached."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}


class SubquadForMaskedLM(Head):
    """Predicts the masked tokens; labels are -100 elsewhere."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "encoder.embeddings.tokens.weight"}

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.transform = nn.Sequential(_linear(config, config.hidden_size), nn.GELU(), nn.LayerNorm(config.hidden_size))
        self.lm_head = _linear(config, config.vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.post_init()

    def score(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.lm_head(self.transform(states)) + self.bias  # (B, n, V)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value


class SubquadForTokenClassification(Head):
    """One answer per token; labels are -100 where none is asked for."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = _linear(config, config.num_labels)
        self.post_init()

    def score(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.classifier(self.dropout(states))  # (B, n, labels)


class SubquadForSequenceClassification(SubquadForTokenClassification):
    """One answer per sequence, from the mean of the real tokens or from the first one; one label is a regression."""

    def score(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.classifier(self.dropout(pool(states, attention_mask, self.config.pooling)))  # (B, labels)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.config.num_labels == 1:
            return F.mse_loss(logits[:, 0].float(), labels.float())
        return super().loss(logits, labels)


def pool(states: Tensor, attention_mask: Tensor | None, how: str) -> Tensor:
    """(B, n, D) → (B, D): the first real token, or the mean of the real ones."""
    if attention_mask is None:
        return states[:, 0] if how == "cls" else states.mean(1)
    if how == "cls":
        first = attention_mask.int().argmax(1)  # (B,)
        return states[torch.arange(states.shape[0], device=states.device), first]
    share = attention_mask.to(states.dtype)[..., None]  # (B, n, 1)
    return (states * share).sum(1) / share.sum(1).clamp(min=1)


def _linear(config: SubquadConfig, width: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(config.hidden_size, width, bias=bias)
    nn.init.normal_(layer.weight, std=config.initializer_range)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
