"""The backbone: one stack of blocks for every mechanism, causal or bidirectional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

from subquad.attention.base import Attention
from subquad.kernels.values import may_look, readable, require
from subquad.models.attention import AttentionLayer
from subquad.models.blocks import Block, Embeddings, Glorot, angles_of, shared_positions
from subquad.models.cache import SubquadCache, begun_anew, lengths_of, with_state_layers
from subquad.models.checks import check_embeds, check_ids, check_mask
from subquad.models.config import SubquadConfig
from subquad.models.loading import count_shared, of_today, read_old, renew
from subquad.models.outputs import BackboneOutput, BlockOutput, collect, returns_output
from subquad.packing import packing_of, sequence_positions, without_gaps

STRIDE = 0x9E3779B97F4A7C15  # between the seeds of two layers


class SubquadPreTrainedModel(PreTrainedModel):
    """What all models share: initialisation, saving and loading, gradient checkpointing."""

    config_class = SubquadConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # Trainer: `num_items_in_batch`
    shared_tables: Mapping[str, str] = MappingProxyType({})  # of the layers of this model, see `shared_positions`
    closes_gaps = True  # padding between tokens: attention sees the real ones together (`subquad.packing`)
    _supports_sdpa = True  # the mechanisms choose their own kernels; the flag is transformers' way of asking
    _no_split_modules: ClassVar[list[str]] = ["Block", "DecoderBlock"]

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.register_load_state_dict_post_hook(count_shared)

    def _init_weights(self, module: nn.Module) -> None:
        """Called for the parts of a model, the innermost first: a part has the last word about what is inside it."""
        if isinstance(module, Attention):
            renew(module)
        elif isinstance(module, AttentionLayer | Glorot):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # "custom code" would pass over a part without parameters of its own, which may still initialise those inside it
        super()._initialize_weights(module, is_custom_code=False)

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, *rest: Any, **options: Any) -> Any:
        state_dict = read_old(checkpoint_files) if state_dict is None else state_dict
        state_dict = None if state_dict is None else of_today(state_dict)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, *rest, **options)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Names of one and the same tensor. transformers looks at them only where word embeddings are tied; the tables
        of MS-VIPE are shared in any case.
        """
        found = super().get_expanded_tied_weights_keys(all_submodels)
        return found if all_submodels else {**found, **self.shared_tables}

    def attention_layers(self) -> list[Attention]:
        """The mechanism of every layer, in the order of the records in an output."""
        stacks = [part for part in self.modules() if isinstance(part, Stack)]
        return [block.attention.attention for stack in stacks for block in stack.blocks]

    def update_statistics(self, statistics: Sequence[Tensor | None] | None) -> None:
        """After an optimizer step: give every layer what it learned from, `statistics` of the outputs of that step."""
        for layer, one in zip(self.attention_layers(), statistics or (), strict=bool(statistics)):
            if one is not None:
                layer.update(one)


class Stack(SubquadPreTrainedModel):
    """Embeddings, blocks and the last norm: what the encoder and the decoder have in common."""

    def __init__(self, config: SubquadConfig, blocks: Sequence[Block], first_layer: int = 0) -> None:
        super().__init__(config)
        self.first_layer = first_layer  # in a model of several stacks
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(blocks)
        self._tied_weights_keys = self.shared_tables = shared_positions(self.blocks)
        last = config.norm == "pre"  # a post-norm block ends normalised
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if last else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.tokens = value

    def run(
        self,
        ids: Tensor | None,
        embeds: Tensor | None,
        mask: Tensor | None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_records: bool | None = None,
        cross: tuple[Tensor | None, ...] = (),
        cu_seqlens: Tensor | None = None,
        cache: DynamicCache | None = None,
        cross_cache: EncoderDecoderCache | None = None,
    ) -> BackboneOutput:
        """All blocks. `cross`: what the blocks of a decoder take beside, the encoder's states and their mask. With
        `cache` the tokens follow those that it has.
        """
        wanted = self._wanted(output_attentions, output_hidden_states, output_records)
        for again in [] if cache is None else begun_anew(cache):
            self.run(**again, cross=cross, cache=cache, cross_cache=cross_cache)
        x = self._inputs(ids, embeds, mask, cached=cache is not None)
        if cache is None:
            key_mask, positions = real_tokens(mask), place(x, mask, position_ids, cu_seqlens)  # (B or 1, n)
        else:
            key_mask, positions = self._after(cache, x, mask, position_ids, cu_seqlens)
        if key_mask is not None and self._begun(cache, key_mask):
            packing = without_gaps(key_mask)
        else:
            shape = (x.shape[0], x.shape[1])
            about: dict[str, Any] = {"pad_left": cache is not None, "device": x.device}
            about["longest"] = self.config.max_position_embeddings
            packing = packing_of(shape, key_mask, position_ids, cu_seqlens, **about)
        if cache is None:
            self._check_length(x.shape[1] if packing is None else packing.longest)
        elif packing is not None and packing.slots is not None:
            raise ValueError("position_ids: they restart at 0, a packed batch, which a cache cannot hold")
        angles = rotary_angles(self.config, positions)
        x = self.embeddings(x, positions, token_type_ids)  # (B, n, D)
        states, outputs = [x], []
        for index, block in enumerate(self.blocks):
            options = {"seed": self._seed(index), "want_weights": wanted[0], "want_record": wanted[2]}
            options["packing"] = packing
            if cache is not None:
                options["state"] = cache.layers[index]
            if cross_cache is not None:
                options["cross_cache"] = (cross_cache, index)
            output = BlockOutput(*block(x, key_mask, angles, *cross, **options))
            x = output.states
            states.append(x)
            outputs.append(output)
        if cache is not None and not torch.compiler.is_compiling():
            cache.layers[0].record(ids, embeds, key_mask, positions, token_type_ids)
        x = states[-1] = self.norm(x)
        weights = tuple(output.weights for output in outputs), tuple(output.cross_weights for output in outputs)
        return BackboneOutput(
            last_hidden_state=x,
            past_key_values=cache if cross_cache is None else cross_cache,
            hidden_states=tuple(states) if wanted[1] else None,
            attentions=weights[0] if wanted[0] else None,
            cross_attentions=weights[1] if wanted[0] and cross else None,
            **collect(outputs),
        )

    def _after(
        self,
        cache: DynamicCache,
        x: Tensor,
        mask: Tensor | None,
        position_ids: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor | None, Tensor]:
        """Which of the new tokens are real, and their positions: each row goes on from its own length."""
        t, lengths, tracing = x.shape[1], lengths_of(cache), torch.compiler.is_compiling()
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens: a packed batch cannot be put into a cache; pass use_cache=False")
        if self.gradient_checkpointing and self.training:
            raise ValueError("use_cache: gradient checkpointing computes layers twice; pass use_cache=False")
        if lengths is not None and lengths.shape[0] != x.shape[0]:
            raise ValueError(f"past_key_values has batch size {len(lengths)}, the new tokens have {len(x)}")
        past = 0 if tracing else cache.get_seq_length()  # a graph is made for any number of them
        if mask is not None and not tracing and mask.shape[1] != past + t:
            raise ValueError(
                f"attention_mask must have {past + t} columns, {past} cached and {t} new, not {mask.shape[1]}"
            )
        key_mask = None if mask is None else mask[:, -t:].bool()
        if key_mask is not None and may_look(key_mask):
            key_mask = None if bool(key_mask.all()) else key_mask  # one look spares one for every layer
        elif key_mask is not None and lengths is not None:
            what = "an exported step" if tracing else "a step that the host must not wait for"
            torch._assert_async(key_mask.all(), f"attention_mask: {what} takes no padding behind the first tokens")
            key_mask = None
        if key_mask is not None and self._begun(cache, key_mask) and not bool((key_mask == key_mask[:1]).all()):
            raise ValueError(
                "attention_mask: behind the first tokens of a row the same slots must be real in all rows; pad prompts "
                "on the left"
            )
        if position_ids is None and mask is None and lengths is not None:
            positions = lengths[:, None] + torch.arange(t, device=x.device)  # (B, t)
        else:
            positions = place(x if mask is None else mask, mask, position_ids)[:, -t:]
        longest = self.config.max_position_embeddings
        if not tracing and past + t > longest and may_look(positions):
            self._check_length(int(positions.max()) + 1)
        elif not tracing and past + t > longest:
            require((positions < longest).all(), f"input_ids go beyond max_position_embeddings={longest}")
        return key_mask, positions

    def _begun(self, cache: DynamicCache | None, key_mask: Tensor) -> bool:
        """Does a row that the cache has tokens of have padding among its new ones?"""
        lengths = None if cache is None or torch.compiler.is_compiling() else lengths_of(cache)
        return lengths is not None and bool(((lengths > 0) & ~key_mask.all(1)).any())

    def streams(self) -> str | None:
        """None if every layer can go on from a cache, else the name of a mechanism that cannot."""
        for block in self.blocks:
            mechanism = block.attention.attention
            if not mechanism.capabilities.streaming or not mechanism.options.causal or mechanism.open_size:
                return mechanism.name
        return None

    def opened(self, past_key_values: Any, use_cache: bool | None) -> DynamicCache | None:
        """The cache of a call: the one that was given, a new one where it is asked for, else None."""
        if past_key_values is None and not use_cache:
            return None
        unable = self.streams()
        if unable is not None:
            raise ValueError(f"use_cache: {unable} cannot go on from a cache in this model; pass use_cache=False")
        layers = len(self.blocks)
        return SubquadCache(layers) if past_key_values is None else with_state_layers(past_key_values, layers)

    def _wanted(self, attentions: bool | None, states: bool | None, records: bool | None) -> tuple[bool, bool, bool]:
        """What a call asks for; what it leaves open the configuration says, and records are for training."""
        config = self.config
        return (
            bool(config.output_attentions if attentions is None else attentions),
            bool(config.output_hidden_states if states is None else states),
            self.training if records is None else records,
        )

    def _seed(self, index: int) -> int | None:
        """What layer `index` samples from; None: torch's generator."""
        seed = None if self.training else self.config.evaluation_seed
        return None if seed is None else (seed + (self.first_layer + index) * STRIDE) % 2**62

    def _inputs(self, ids: Tensor | None, embeds: Tensor | None, mask: Tensor | None, cached: bool) -> Tensor:
        prefix = "decoder_" if self.first_layer else ""
        if ids is not None and embeds is None:
            check_ids(f"{prefix}input_ids", ids)
        elif embeds is not None and ids is None:
            check_embeds(f"{prefix}inputs_embeds", embeds, self.config.hidden_size)
        else:
            raise ValueError(f"give {prefix}input_ids or {prefix}inputs_embeds, one of the two")
        x: Any = embeds if ids is None else ids
        check_mask(f"{prefix}attention_mask", mask, x, cached=cached)
        return x

    def _check_length(self, length: int) -> None:
        name, longest = "decoder_input" if self.first_layer else "input", self.config.max_position_embeddings
        if length > longest:
            raise ValueError(f"{name}_ids has length {length}, beyond max_position_embeddings={longest}")


class SubquadModel(Stack):
    """The backbone: ids (B, n) → hidden states (B, n, D).

    A packed batch is several sequences one after another in a row: `position_ids` that restart at 0, or `cu_seqlens`
    (S + 1,) for a batch of one row. No sequence sees another, and each gives what it gives alone.
    `output_records=True` returns what the mechanisms have to say of this call: density, auxiliary loss, statistics;
    by default (None) they are returned in training.
    """

    def __init__(self, config: SubquadConfig) -> None:
        causal = config.is_decoder
        super().__init__(config, [Block(config, index, causal=causal) for index in range(config.num_hidden_layers)])

    @returns_output
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_records: bool | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
    ) -> BackboneOutput:
        """`use_cache=True` returns `past_key_values`, from which a causal model goes on when it is given them."""
        return self.run(
            input_ids, inputs_embeds, attention_mask, position_ids, token_type_ids,
            output_attentions, output_hidden_states, output_records, cu_seqlens=cu_seqlens,
            cache=self.opened(past_key_values, use_cache),
        )  # fmt: skip


def with_keys(config: SubquadConfig, **keys: Any) -> SubquadConfig:
    """The configuration with these keys: itself where it agrees, else a copy, for it is the caller's."""
    if not isinstance(config, SubquadConfig):
        raise TypeError(f"config must be a SubquadConfig, not {config!r:.60}")
    if all(getattr(config, key) == value for key, value in keys.items()):
        return config
    config = deepcopy(config)
    for key, value in keys.items():
        setattr(config, key, value)
    return config


def place(
    x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Positions count the real tokens of a sequence, so that padding moves nothing: (B, n), (1, n) without a mask."""
    if position_ids is not None:
        return position_ids
    if cu_seqlens is not None:
        return sequence_positions(cu_seqlens, attention_mask, x.shape[1]).to(x.device)
    if attention_mask is None:
        return torch.arange(x.shape[1], device=x.device)[None]
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def rotary_angles(config: SubquadConfig, positions: Tensor) -> Tensor | None:
    """By which queries and keys are turned, (B or 1, n, d/2); None with other positions."""
    return angles_of(positions, config.head_dim) if config.positions == "rotary" else None


def real_tokens(attention_mask: Tensor | None) -> Tensor | None:
    """transformers' mask (1 = real) as ours; None where nothing is padded, which is cheaper."""
    if attention_mask is None:
        return None
    mask = attention_mask.bool()
    if readable(mask) and bool(mask.all()):
        return None
    return mask
