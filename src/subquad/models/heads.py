"""The models: the backbone with a head for each kind of task, and the loss that trains it.

A head's loss is that of its task plus λ · the auxiliary loss of its mechanisms (the density of SBM layers) in training.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache

from subquad.distributed.layouts import Layout, current
from subquad.distributed.parallel import total
from subquad.kernels.affine import apply_linear
from subquad.models.blocks import Glorot
from subquad.models.config import SubquadConfig
from subquad.models.encoder import SubquadModel, SubquadPreTrainedModel, real_tokens, with_keys
from subquad.models.generation import CachedGenerationMixin
from subquad.models.loading import BIAS, OLD_BIAS
from subquad.models.losses import IGNORED, average, binary_cross_entropy, cross_entropy, squared_error
from subquad.models.outputs import BackboneOutput, Scores, returns_output
from subquad.packing import Packing, packing_of

TIED = {"lm_head.weight": "encoder.embeddings.tokens.weight"}


class Head(SubquadPreTrainedModel):
    """The backbone, causal or not, and what makes logits of its states. A kind of head says which logits and loss."""

    causal: ClassVar[bool] = False

    def __init__(self, config: SubquadConfig) -> None:
        config = with_keys(config, is_decoder=self.causal, is_encoder_decoder=False)
        super().__init__(config)
        self.encoder = SubquadModel(config)

    @returns_output
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_records: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Scores:
        """`num_items_in_batch`: the labels of all batches that one optimizer step accumulates, from Trainer."""
        backbone = self.encoder(
            input_ids, attention_mask, position_ids, token_type_ids, inputs_embeds,
            output_attentions, output_hidden_states, output_records, cu_seqlens, return_dict=True,
        )  # fmt: skip
        states = backbone.last_hidden_state
        logits = self.score(states, attention_mask, sequences(states, attention_mask, position_ids, cu_seqlens))
        return self.scored(backbone, logits, labels, num_items_in_batch)

    def scored(
        self, backbone: BackboneOutput, logits: Tensor, labels: Tensor | None, num_items: Tensor | int | None
    ) -> Scores:
        loss = None
        if labels is not None:
            loss, share = average(*self.loss_terms(logits, labels.to(logits.device)), num_items)
            loss = with_auxiliary(self, loss, backbone.auxiliary_loss, share)
        return Scores(
            loss=loss,
            logits=logits,
            past_key_values=backbone.past_key_values,
            hidden_states=backbone.hidden_states,
            attentions=backbone.attentions,
            density=backbone.density,
            auxiliary_loss=backbone.auxiliary_loss,
            statistics=backbone.statistics,
        )

    def score(self, states: Tensor, attention_mask: Tensor | None, packing: Packing | None) -> Tensor:
        raise NotImplementedError

    def loss_terms(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses of all labels that count, and their number: cross-entropy, smoothed in training."""
        return cross_entropy(logits, labels, self.config.label_smoothing if self.training else 0.0)


def with_auxiliary(model: Any, loss: Tensor, auxiliary: Tensor | None, share: Tensor | float) -> Tensor:
    """The task's loss plus λ · the auxiliary loss, in training; `share` is that of this batch in the optimizer step."""
    if auxiliary is None or not model.training or not model.config.density_weight:
        return loss
    return loss + model.config.density_weight * share * auxiliary.to(loss)


class SubquadForCausalLM(Head, CachedGenerationMixin):
    """Predicts the next token: ids (B, n) → logits (B, n, vocabulary). Labels are the ids; the shift happens here."""

    causal = True
    _tied_weights_keys: ClassVar[dict[str, str]] = TIED

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @partial(returns_output, unseen=("shift_labels",))
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_records: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Scores:
        """`shift_labels` are labels that have been shifted already. `logits_to_keep`: only the last so many logits, or
        those at the places of a tensor; 0 is all. `use_cache=True` returns `past_key_values`; given them, the model
        reads only what is new, with an `attention_mask` for everything.
        """
        backbone = self.encoder(
            input_ids, attention_mask, position_ids, token_type_ids, inputs_embeds,
            output_attentions, output_hidden_states, output_records, cu_seqlens, past_key_values, use_cache,
            return_dict=True,
        )  # fmt: skip
        keep_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if labels is not None and shift_labels is None:
            packing = sequences(backbone.last_hidden_state, attention_mask, position_ids, cu_seqlens)
            if packing is not None:  # the last token of a sequence does not predict the first one of the next
                first = packing.first_slots
                labels = labels.flatten().index_fill(0, first.to(labels.device), IGNORED).view_as(labels)
            shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if shift_labels is not None and not keep_all:
            raise ValueError("logits_to_keep: the loss needs all logits; leave it out, or the labels")
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        states = backbone.last_hidden_state if keep_all else backbone.last_hidden_state[:, kept]
        return self.scored(
            backbone, apply_linear(self.lm_head, states), shift_labels, num_items_in_batch
        )  # logits (B, n, V)


class SubquadForMaskedLM(Head):
    """Predicts the masked tokens: ids (B, n) → logits (B, n, vocabulary); labels (B, n) are -100 elsewhere."""

    _tied_weights_keys: ClassVar[dict[str, str]] = TIED

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.lm_head = nn.Linear(width, config.vocab_size)
        self.post_init()

    def score(self, states: Tensor, attention_mask: Tensor | None, packing: Packing | None) -> Tensor:
        return apply_linear(self.lm_head, self.transform(states))  # (B, n, V)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        if prefix + OLD_BIAS in state_dict:
            state_dict[prefix + BIAS] = state_dict.pop(prefix + OLD_BIAS)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class SubquadForTokenClassification(Head):
    """One answer per token: ids (B, n) → logits (B, n, labels); labels (B, n) are -100 where none is asked for."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def score(self, states: Tensor, attention_mask: Tensor | None, packing: Packing | None) -> Tensor:
        return self.classifier(self.dropout(states))  # (B, n, labels)


class SubquadForSequenceClassification(SubquadForTokenClassification):
    """One answer per sequence: ids (B, n) → logits (B, labels).

    It is made from the mean of the real tokens or from the first one, by one linear map or two. A packed batch has as
    many answers as sequences, in their order.

    The loss follows `config.problem_type`; without it one label is a regression, integer labels are classes and
    floating-point labels (B, num_labels) are several answers at once, each 0 or 1.
    """

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        if config.classifier == "mlp":
            inner = config.intermediate_size
            self.classifier = Glorot(
                nn.Linear(config.hidden_size, inner), nn.ReLU(), nn.Linear(inner, config.num_labels)
            )
            self.post_init()

    def score(self, states: Tensor, attention_mask: Tensor | None, packing: Packing | None) -> Tensor:
        return self.classifier(self.dropout(self._pooled(states, attention_mask, packing)))  # (B, labels)

    def _pooled(self, states: Tensor, attention_mask: Tensor | None, packing: Packing | None) -> Tensor:
        if packing is None:
            return pool(states, attention_mask, self.config.pooling)  # (B, D)
        return pool_packed(states, packing, self.config.pooling)  # (sequences, D)

    def loss_terms(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        kind = self.config.problem_type
        if kind == "regression" or (kind is None and self.config.num_labels == 1):
            return squared_error(logits, labels)
        if kind == "multi_label_classification" or (kind is None and labels.is_floating_point()):
            return binary_cross_entropy(logits, labels)
        return super().loss_terms(logits, labels)


def pool(states: Tensor, attention_mask: Tensor | None, how: str) -> Tensor:
    """(B, n, D) → (B, D): the first real token, or the mean of the real ones."""
    layout = current()
    if layout is not None:  # a part of the sequence
        return pool_part(states, layout, how)
    if attention_mask is None:
        return states[:, 0] if how == "cls" else states.mean(1)
    if how == "cls":
        first = attention_mask.int().argmax(1)  # (B,)
        return states[torch.arange(states.shape[0], device=states.device), first]
    share = attention_mask.to(states.dtype)[..., None]  # (B, n, 1)
    return (states * share).sum(1) / share.sum(1).clamp(min=1)


def sequences(
    states: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cu_seqlens: Tensor | None
) -> Packing | None:
    """The sequences of a packed batch; None where a row is one."""
    if position_ids is None and cu_seqlens is None:
        return None
    given = (real_tokens(attention_mask), position_ids, cu_seqlens)
    packing = packing_of((states.shape[0], states.shape[1]), *given, device=states.device)
    return None if packing is None or packing.slots is None else packing


def pool_packed(states: Tensor, packing: Packing, how: str) -> Tensor:
    """(B, n, D) → (S, D): the first token of every sequence, or the mean of its tokens."""
    if how == "cls":
        return states.flatten(0, 1)[packing.first_slots]
    assert packing.slots is not None
    slots, lengths = packing.slots.to(states.device), packing.lengths  # (T,), (S,)
    tokens, number = states.flatten(0, 1)[slots], torch.arange(len(lengths), device=states.device)
    own = number.repeat_interleave(lengths, output_size=len(slots))  # (T,)
    return states.new_zeros(len(lengths), states.shape[-1]).index_add(0, own, tokens) / lengths[:, None]


def pool_part(states: Tensor, layout: Layout, how: str) -> Tensor:
    """The same where each process has a part (B, t, D) of the sequence: the sum over the processes."""
    real = torch.ones(len(states), layout.n, dtype=torch.bool) if layout.key_mask is None else layout.key_mask
    if how == "cls":
        place = torch.arange(layout.n, device=real.device)
        real = real & (place == real.int().argmax(1, keepdim=True))
    share = real.to(states) / real.sum(1, keepdim=True).clamp(min=1).to(states)  # (B, n)
    return total((states * layout.take(share)[..., None]).sum(1), layout.group)
