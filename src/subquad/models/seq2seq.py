"""Encoder–decoder: the chosen attention in the encoder and in the decoder's self-attention, full attention between.

One vocabulary for both sides (Vaswani et al. 2017): input, output and label embeddings are the same table.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from subquad.layers import MultiheadAttention
from subquad.models.blocks import Block, Embeddings, share_positions
from subquad.models.config import SubquadConfig
from subquad.models.encoder import SubquadModel, SubquadPreTrainedModel, place, real_tokens, rotary_angles
from subquad.models.heads import IGNORED, Scores, cross_entropy


class DecoderBlock(Block):
    """A causal block with attention to the encoder's states between self-attention and feed-forward."""

    def __init__(self, config: SubquadConfig, index: int) -> None:
        super().__init__(config, index, causal=True)
        width = config.hidden_size
        self.cross = MultiheadAttention(width, config.num_attention_heads, config.attention_dropout, batch_first=True)
        self.cross_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, key_mask, angles, states: Tensor, padding: Tensor | None) -> Tensor:
        if self.pre:
            x = x + self.dropout(self.attention(self.norms[0](x), key_mask, angles))
            x = x + self.dropout(self._look(self.cross_norm(x), states, padding))
            return x + self.dropout(self.feedforward(self.norms[1](x)))
        x = self.norms[0](x + self.dropout(self.attention(x, key_mask, angles)))
        x = self.cross_norm(x + self.dropout(self._look(x, states, padding)))
        return self.norms[1](x + self.dropout(self.feedforward(x)))

    def _look(self, x: Tensor, states: Tensor, padding: Tensor | None) -> Tensor:
        return self.cross(x, states, states, key_padding_mask=padding, need_weights=False)[0]


class Decoder(SubquadPreTrainedModel):
    """Embeddings and decoder blocks: ids (B, m) and encoder states (B, n, D) → (B, m, D)."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(DecoderBlock(config, index) for index in range(config.num_hidden_layers))
        self._tied_weights_keys = self.shared_tables = share_positions(self.blocks)
        last = config.norm == "pre"
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if last else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, ids: Tensor, mask: Tensor | None, states: Tensor, states_mask: Tensor | None) -> Tensor:
        longest = self.config.max_position_embeddings
        if ids.shape[1] > longest:
            raise ValueError(f"decoder_input_ids has length {ids.shape[1]}, beyond max_position_embeddings={longest}")
        positions = place(ids, mask, None)
        angles = rotary_angles(self.config, positions)
        real = real_tokens(states_mask)
        padding = None if real is None else ~real
        x = self.embeddings(ids, positions, None)
        for block in self.blocks:
            x = block(x, real_tokens(mask), angles, states, padding)
        return self.norm(x)


class SubquadForConditionalGeneration(SubquadPreTrainedModel, GenerationMixin):
    """Translates: input_ids (B, n) and labels (B, m), -100 = padding. The decoder reads the labels, shifted by one."""

    causal: ClassVar[bool] = True
    base_model_prefix = ""
    main_input_name = "input_ids"
    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "lm_head.weight": "encoder.embeddings.tokens.weight",
        "decoder.embeddings.tokens.weight": "encoder.embeddings.tokens.weight",
    }

    def __init__(self, config: SubquadConfig) -> None:
        if config.decoder_start_token_id is None or config.pad_token_id is None:
            raise ValueError("decoder_start_token_id and pad_token_id are needed for translation")
        config.is_decoder, config.is_encoder_decoder = False, True
        super().__init__(config)
        self.encoder = SubquadModel(config)
        self.decoder = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=config.initializer_range)
        self.post_init()

    def get_encoder(self, *unused: Any, **also_unused: Any) -> nn.Module:
        return self.encoder

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embeddings.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embeddings.tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> Scores:
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("give labels or decoder_input_ids")
            decoder_input_ids = self.shifted(labels)
            decoder_attention_mask = self._label_mask(labels)
        states = (self.encoder(input_ids, attention_mask) if encoder_outputs is None else encoder_outputs)[0]
        hidden = self.decoder(decoder_input_ids, decoder_attention_mask, states, attention_mask)
        logits = self.lm_head(hidden)  # (B, m, V)
        loss = None
        if labels is not None:
            smoothing = self.config.label_smoothing if self.training else 0.0
            loss = self.with_density(cross_entropy(logits, labels, smoothing))
        output = Scores(loss, logits, None, self.density())
        return output if return_dict else output.to_tuple()

    def shifted(self, labels: Tensor) -> Tensor:
        """What the decoder reads to predict the labels: the start token, then all labels but the last."""
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, self.config.pad_token_id)], 1)

    def _label_mask(self, labels: Tensor) -> Tensor:
        real = (labels != IGNORED).long()
        return torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], 1)

    def prepare_inputs_for_generation(
        self,
        decoder_input_ids: Tensor,
        encoder_outputs: BaseModelOutput | None = None,
        attention_mask=None,
        **unused: Any,
    ) -> dict[str, Any]:
        """The whole target so far at every step: right for every mechanism, and not yet cached."""
        return {
            "input_ids": None,
            "encoder_outputs": encoder_outputs,
            "decoder_input_ids": decoder_input_ids,
            "attention_mask": attention_mask,
        }
