"""`generate`, with the states of the mechanisms as its cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin

from subquad.models.cache import SubquadCache, SubquadEncoderDecoderCache
from subquad.models.config import SubquadConfig


class CachedGenerationMixin(GenerationMixin):
    """`generate` reads each token once where every layer can stream (`use_cache`, the default). Where one cannot, or
    where attention weights are asked for, it runs the whole sequence at every step; asking for both is an error.
    """

    config: SubquadConfig
    get_input_embeddings: Any

    def decoder_stack(self) -> Any:
        """The stack that writes."""
        return self.decoder if self.config.is_encoder_decoder else self.encoder  # type: ignore[attr-defined]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return True

    def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("use_cache")
        asked = getattr(generation_config, "use_cache", None) if asked is None else asked
        unable = self.decoder_stack().streams()
        if asked and unable is not None:
            raise ValueError(f"use_cache: {unable} cannot go on from a cache in this model; leave use_cache out")
        return super()._prepare_generation_config(generation_config, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **options: Any
    ) -> Any:
        weights = generation_config.output_attentions or self.config.output_attentions
        given = model_kwargs.get("past_key_values")
        if given is None and (weights or self.decoder_stack().streams() is not None):
            generation_config.use_cache = False
        if given is None and generation_config.use_cache is not False:
            kind = generation_config.cache_implementation
            if kind not in (None, "dynamic"):
                raise ValueError(
                    f"cache_implementation: these models have a cache of their own; leave it out, it was {kind!r}"
                )
            made: Any = SubquadCache(len(self.decoder_stack().blocks))
            made = SubquadEncoderDecoderCache(made, DynamicCache()) if self.config.is_encoder_decoder else made
            if generation_config.is_assistant:
                made.activate_past_recording()
            model_kwargs["past_key_values"] = made
            return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest, **options)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        again = past_key_values is None and not is_first_iteration and not self.config.is_encoder_decoder
        if again and inputs_embeds is not None:  # without a cache the embedded prompt is read at every step
            new = kwargs["position_ids"].shape[1] - inputs_embeds.shape[1]  # tokens after the prompt
            embedded = self.get_input_embeddings()(input_ids[:, -new:])
            inputs_embeds, is_first_iteration = torch.cat([inputs_embeds, embedded.to(inputs_embeds)], 1), True
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
