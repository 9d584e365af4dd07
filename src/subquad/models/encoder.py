"""The backbone: one stack of blocks for every mechanism, causal or bidirectional."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from subquad.attention.base import Attention
from subquad.models.blocks import Block, Embeddings, angles_of, share_positions
from subquad.models.config import SubquadConfig


class SubquadPreTrainedModel(PreTrainedModel):
    """What all models share: saving and loading, gradient checkpointing, the density loss of SBM layers."""

    config_class = SubquadConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    shared_tables: Mapping[str, str] = MappingProxyType({})  # of the layers of this model, see `share_positions`
    _supports_sdpa = True  # the mechanisms choose their own kernels; the flag is transformers' way of asking

    # Modules initialise themselves when they are made (a mechanism knows best how), and loading makes them for real,
    # not on the meta device: what a checkpoint lacks keeps its own initialisation, tables that are not saved are there.

    def _init_weights(self, module: nn.Module) -> None:
        return None

    @classmethod
    def get_init_context(cls, *args: Any, **kwargs: Any) -> list[Any]:
        contexts = super().get_init_context(*args, **kwargs)
        unwanted = (torch.device, type(contextlib.nullcontext()))
        return [context for context in contexts if not isinstance(context, unwanted)]

    def _move_missing_keys_from_meta_to_device(self, *args: Any, **kwargs: Any) -> None:
        return None

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Names of one and the same tensor. transformers looks at them only where word embeddings are tied; the tables
        of MS-VIPE are shared in any case.
        """
        found = super().get_expanded_tied_weights_keys(all_submodels)
        return found if all_submodels else {**found, **self.shared_tables}

    def density(self) -> Tensor | None:
        """Sampled edges / possible edges, (layers, heads), of the SBM layers in the last call; None without any."""
        layers = self._sampled()
        return torch.stack([layer.last_density.detach() for layer in layers]) if layers else None

    def _sampled(self) -> list[Any]:
        """The mechanisms that draw graphs."""
        return [part for part in self.modules() if isinstance(part, Attention) and part.capabilities.stochastic]

    def with_density(self, loss: Tensor | None) -> Tensor | None:
        """The task's loss plus λ · the density loss of all SBM layers."""
        if loss is None or not self.config.density_weight or not self.training or not self._sampled():
            return loss
        from subquad.attention.sbm import density_loss

        return loss + self.config.density_weight * density_loss(self).to(loss)


class SubquadModel(SubquadPreTrainedModel):
    """Embeddings and blocks: ids (B, n) → hidden states (B, n, D)."""

    base_model_prefix = ""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        causal = config.is_decoder
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config, index, causal=causal) for index in range(config.num_hidden_layers))
        self._tied_weights_keys = self.shared_tables = share_positions(self.blocks)
        last = config.norm == "pre"  # a post-norm block ends normalised
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if last else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = False,
        output_attentions: bool | None = False,
        return_dict: bool | None = True,
    ) -> BaseModelOutput:
        if output_attentions:
            raise ValueError("output_attentions: the weights are n × n; `attention.weights` gives those of one layer")
        x = self._inputs(input_ids, inputs_embeds)
        positions = place(x, attention_mask, position_ids)  # (B or 1, n)
        key_mask = real_tokens(attention_mask)
        angles = rotary_angles(self.config, positions)
        x = self.embeddings(x, positions, token_type_ids)
        states = [x] if output_hidden_states else []
        for block in self.blocks:
            x = block(x, key_mask, angles)
            states += [x] if output_hidden_states else []
        x = self.norm(x)
        output = BaseModelOutput(last_hidden_state=x, hidden_states=tuple(states) or None)
        return output.to_tuple() if return_dict is False else output

    def _inputs(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two")
        x = input_ids if input_ids is not None else inputs_embeds
        longest = self.config.max_position_embeddings
        if x.shape[1] > longest:
            raise ValueError(f"input_ids has length {x.shape[1]}, beyond max_position_embeddings={longest}")
        return x


def place(x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """Positions count real tokens, so that left padding moves nothing: (B, n), or (1, n) without a mask."""
    if position_ids is not None:
        return position_ids
    if attention_mask is None:
        return torch.arange(x.shape[1], device=x.device)[None]
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def rotary_angles(config: SubquadConfig, positions: Tensor) -> Tensor | None:
    """By which queries and keys are turned, (B or 1, n, d/2); None with other positions."""
    if config.positions != "rotary":
        return None
    return angles_of(positions, config.hidden_size // config.num_attention_heads)


def real_tokens(attention_mask: Tensor | None) -> Tensor | None:
    """transformers' mask (1 = real) as ours; None where nothing is padded, which is cheaper."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must have shape (B, n), not {tuple(attention_mask.shape)}")
    mask = attention_mask.bool()
    if not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask
