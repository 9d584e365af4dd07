"""Encoder–decoder: the chosen attention in the encoder and in the decoder's self-attention, full attention between.

One vocabulary for both sides (Vaswani et al. 2017): input, output and label embeddings are the same table.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache

from subquad.models.attention import AttentionLayer
from subquad.models.blocks import Block
from subquad.models.cache import SubquadCache, SubquadEncoderDecoderCache, split
from subquad.models.checks import check_ids, check_mask
from subquad.models.config import SubquadConfig
from subquad.models.encoder import Stack, SubquadModel, SubquadPreTrainedModel, real_tokens, with_keys
from subquad.models.generation import CachedGenerationMixin
from subquad.models.heads import with_auxiliary
from subquad.models.losses import IGNORED, average, cross_entropy
from subquad.models.outputs import BackboneOutput, BlockOutput, Seq2SeqScores, returns_output

TABLE = "encoder.embeddings.tokens.weight"


class DecoderBlock(Block):
    """A causal block with attention to the encoder's states between self-attention and feed-forward."""

    def __init__(self, config: SubquadConfig, index: int) -> None:
        super().__init__(config, index, causal=True)
        self.cross = AttentionLayer(config, "full", dropout=config.attention_dropout)
        self.cross_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        angles: Tensor | None,
        context: Tensor,
        real: Tensor | None,
        cross_cache: tuple[EncoderDecoderCache, int] | None = None,
        **options: Any,
    ) -> BlockOutput:
        """`context`: the encoder's states (B, m, D), `real` (B, m) which of them are no padding; `cross_cache` keeps
        the keys and values that are made of them.
        """
        y, record, weights = self.attention(self.before(self.norms[0], x), key_mask, angles, **options)
        x = self.after(self.norms[0], x, y)
        want = options.get("want_weights", False)
        y, _, cross = self.cross(
            self.before(self.cross_norm, x), real, context=context, want_weights=want, cross=cross_cache
        )
        x = self.feed(self.after(self.cross_norm, x, y))
        return BlockOutput(x, weights, cross, *record[:3])


class Decoder(Stack):
    """Embeddings and decoder blocks: ids (B, m) and encoder states (B, n, D) → (B, m, D)."""

    def __init__(self, config: SubquadConfig) -> None:
        layers = config.num_hidden_layers  # as many as the encoder has, and counted after them
        super().__init__(config, [DecoderBlock(config, index) for index in range(layers)], first_layer=layers)

    @returns_output
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_records: bool | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
    ) -> BackboneOutput:
        if encoder_hidden_states is not None:
            check_mask("attention_mask", encoder_attention_mask, encoder_hidden_states)
        if past_key_values is None and use_cache:
            past_key_values = SubquadEncoderDecoderCache(SubquadCache(len(self.blocks)), DynamicCache())
        own, across = split(past_key_values)
        return self.run(
            input_ids, inputs_embeds, attention_mask, None, None, output_attentions, output_hidden_states,
            output_records, cross=(encoder_hidden_states, real_tokens(encoder_attention_mask)),
            cache=self.opened(own, use_cache), cross_cache=across,
        )  # fmt: skip


class SubquadForConditionalGeneration(SubquadPreTrainedModel, CachedGenerationMixin):
    """Translates: input_ids (B, n) and labels (B, m), -100 = padding. The decoder reads the labels, shifted by one."""

    main_input_name = "input_ids"
    shared_tables: ClassVar[dict[str, str]] = {"decoder.embeddings.tokens.weight": TABLE}
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": TABLE, **shared_tables}

    def __init__(self, config: SubquadConfig) -> None:
        if config.decoder_start_token_id is None or config.pad_token_id is None:
            raise ValueError("decoder_start_token_id and pad_token_id are needed for translation")
        config = with_keys(config, is_decoder=False, is_encoder_decoder=True)
        super().__init__(config)
        self.encoder = SubquadModel(config)
        self.decoder = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embeddings.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embeddings.tokens = self.decoder.embeddings.tokens = value

    @returns_output
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_records: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
    ) -> Seq2SeqScores:
        """Without decoder_input_ids the decoder reads the labels. `use_cache=True` returns `past_key_values`, an
        EncoderDecoderCache; given it, the decoder reads only what is new.
        """
        wanted = {
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
            "output_records": output_records,
            "return_dict": True,
        }
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError("give labels or decoder_input_ids")
            check_ids("labels", labels)
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            decoder_attention_mask = label_mask(labels) if decoder_attention_mask is None else decoder_attention_mask
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **wanted)
        source = encoder_outputs if isinstance(encoder_outputs, BackboneOutput) else _named(encoder_outputs)
        target = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            source.last_hidden_state,
            attention_mask,
            decoder_inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **wanted,
        )
        logits = self.lm_head(target.last_hidden_state)  # (B, m, V)
        records = joined(source, target)
        loss = None
        if labels is not None:
            smoothing = self.config.label_smoothing if self.training else 0.0
            loss, share = average(*cross_entropy(logits, labels.to(logits.device), smoothing), num_items_in_batch)
            loss = with_auxiliary(self, loss, records["auxiliary_loss"], share)
        return Seq2SeqScores(
            loss=loss,
            logits=logits,
            past_key_values=target.past_key_values,
            decoder_hidden_states=target.hidden_states,
            decoder_attentions=target.attentions,
            cross_attentions=target.cross_attentions,
            encoder_last_hidden_state=source.last_hidden_state,
            encoder_hidden_states=source.hidden_states,
            encoder_attentions=source.attentions,
            **records,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """What the decoder reads to predict the labels: the start token, then all labels but the last."""
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, self.config.pad_token_id)], 1)


def label_mask(labels: Tensor) -> Tensor:
    """Which tokens of `prepare_decoder_input_ids_from_labels` are real."""
    real = (labels != IGNORED).long()
    return torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], 1)


def joined(source: BackboneOutput, target: BackboneOutput) -> dict[str, Any]:
    """The records of the encoder's layers and those of the decoder's as one."""
    both = [part for part in (source, target) if part.density is not None]
    auxiliary = [part.auxiliary_loss for part in (source, target) if part.auxiliary_loss is not None]
    statistics = [part.statistics for part in (source, target) if part.statistics is not None]
    return {
        "density": torch.cat([part.density for part in both]) if both else None,  # (layers of both, H)
        "auxiliary_loss": torch.stack(auxiliary).mean() if auxiliary else None,
        "statistics": sum(statistics, ()) if len(statistics) == 2 else None,
    }


def _named(outputs: Any) -> BackboneOutput:
    """Another model's output, or a tuple: states, all hidden states, attentions."""
    values = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    states = getattr(outputs, "hidden_states", values[1] if len(values) > 1 else None)
    weights = getattr(outputs, "attentions", values[2] if len(values) > 2 else None)
    return BackboneOutput(last_hidden_state=values[0], hidden_states=states, attentions=weights)
