"""The configuration of every subquad model: one class, whatever the attention inside."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from subquad.attention.registry import attention, mechanism
from subquad.core.options import split_spec

POSITIONS = ("learned", "sinusoidal", "rotary", "own", "none", "published", "rotary-or-published")
CHOICES = {"positions": POSITIONS, "norm": ("pre", "post"), "pooling": ("mean", "cls"),
           "mlp": ("every", "last"), "classifier": ("linear", "mlp")}  # fmt: skip


class SubquadConfig(PreTrainedConfig):
    """What a model is made of.

    `attention` is a spec such as "combiner-fixed:span=64", or a list of specs that the layers take in turn (a
    shorter list is repeated: ["full", "strided:w=32"] alternates dense and sparse). `positions`: learned or
    sinusoidal embeddings, rotary (turns q and k, for mechanisms on q, k, v), own (the mechanism's: MS-VIPE) or none;
    published becomes what the mechanism's paper has, own or learned; rotary-or-published becomes rotary, or published
    where a mechanism works on tokens. `mlp`: a feed-forward layer in every block, or only in the last one (Yun et al.
    2020, section 5.1). `classifier`: the head of sequence classification is one
    linear map, or two with a ReLU between them and `intermediate_size` units (Xiong et al. 2021; Lee et al. 2023). For
    pairs of sequences linear means three maps with ReLU (Tay et al. 2021), mlp two as before.
    `cols` says that the sequence is a picture with rows of so many tokens; mechanisms on a grid take it from here.
    `num_key_value_heads` is the number of heads of keys and values (fewer than `num_attention_heads`: grouped-query
    attention) and `head_dim` the width of a head; by default as many as query heads, and hidden_size / heads.
    `density_weight` is λ of the SBM density loss. `evaluation_seed` makes sampled attention repeatable: in evaluation
    every call draws the same graphs, whatever the state of torch's generator; None (the default) draws new ones.

    An unknown keyword is an error. Unknown keys of a *file* are kept, as transformers keeps them.
    """

    model_type = "subquad"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "density", "auxiliary_loss", "statistics", "encoder_last_hidden_state", "past_key_values",
    ]  # fmt: skip

    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 512
    max_position_embeddings: int = 1024
    attention: str | list[str] = "full"
    positions: str = "learned"
    norm: str = "pre"
    hidden_act: str = "gelu"
    pooling: str = "mean"
    mlp: str = "every"
    classifier: str = "linear"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    type_vocab_size: int = 0
    density_weight: float = 0.0
    evaluation_seed: int | None = None
    label_smoothing: float = 0.0
    cols: int | None = None
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    is_decoder: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None

    def __post_init__(self, **extra: Any) -> None:
        of_file = extra.pop(_OF_FILE, {})
        for key in extra:
            if key not in _ACCEPTED:
                raise TypeError(_unknown(key))
        super().__post_init__(**extra, **of_file)
        self._fill_in()
        self.check()
        self.positions = self._settled_positions()

    def _fill_in(self) -> None:
        """What is None follows from the other sizes; impossible ones are left for `check` to name."""
        heads, width = self.num_attention_heads, self.hidden_size
        if self.num_key_value_heads is None:
            self.num_key_value_heads = heads
        if self.head_dim is None and isinstance(heads, int) and heads >= 1 and isinstance(width, int):
            if width % heads:
                raise ValueError(f"hidden_size must be a multiple of num_attention_heads={heads}, not {width}")
            self.head_dim = width // heads

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        known = _ACCEPTED | {field.name for field in fields(cls)}
        of_file = {key: value for key, value in config_dict.items() if key not in known}
        config_dict = {key: value for key, value in config_dict.items() if key in known}
        return super().from_dict({**config_dict, _OF_FILE: of_file}, **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> SubquadConfig:
        return cls.from_dict(cls._dict_from_json_file(json_file))

    def check(self) -> None:
        """Refuse what no model can be made of, by the name of the key."""
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                    "head_dim", "intermediate_size", "max_position_embeddings"):  # fmt: skip
            if not isinstance(getattr(self, key), int) or getattr(self, key) < 1:
                raise ValueError(f"{key} must be an integer ≥ 1, not {getattr(self, key)!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads={self.num_attention_heads}, "
                f"not be {self.num_key_value_heads}"
            )
        seed = self.evaluation_seed
        if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 2**62):
            raise ValueError(f"evaluation_seed must be an integer from 0 to 2^62 - 1, or None, not {seed!r}")
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} must be one of {', '.join(allowed)}, not {getattr(self, key)!r}")
        given = self.attention
        if not isinstance(given, (str, list, tuple)) or not given or not all(isinstance(x, str) for x in self.specs):
            raise ValueError(f"attention must be a spec or a list of specs, not {self.attention!r}")
        for spec in set(self.specs):
            mechanism(split_spec(spec)[0])  # an unknown name is an error here, not in the first layer
        if self._settled_positions() == "rotary" and self.head_dim % 2:
            raise ValueError(f"positions=rotary needs heads of even width, not {self.head_dim}")

    def _settled_positions(self) -> str:
        """`positions`, where two of its values ask the mechanisms."""
        if self.positions == "rotary-or-published":
            levels = {mechanism(split_spec(spec)[0]).capabilities.level for spec in self.specs}
            if "layer" not in levels:
                return "rotary"
        elif self.positions != "published":
            return self.positions
        found = {_published_positions(spec) for spec in self.specs}
        return found.pop() if len(found) == 1 else "learned"

    @property
    def specs(self) -> list[str]:
        return [self.attention] if isinstance(self.attention, str) else list(self.attention)

    def layer_options(self, index: int, *, causal: bool) -> tuple[str, dict[str, Any]]:
        """The spec of layer `index` and the options that the model adds to it."""
        spec = self.specs[index % len(self.specs)]
        name, given = split_spec(spec)
        known = mechanism(name).Options.__dataclass_fields__
        level = mechanism(name).capabilities.level
        if "causal" in given:  # a causal model must not see the future, whatever a spec says
            raise ValueError(
                f"attention={spec!r}: causal is the model's to say ({str(causal).lower()} here): leave it out"
            )
        options: dict[str, Any] = {"causal": causal, "max_length": self.max_position_embeddings}
        if self.attention_dropout:
            options["dropout"] = self.attention_dropout
        if "layer_index" in known:
            options["layer_index"] = index
        if self.cols is not None and "cols" in known:
            options["cols"] = self.cols
        if self.positions == "own":
            if "positions" not in known:
                raise ValueError(f"positions=own: {name} has no positions of its own; take learned, sinusoidal, rotary")
            options["positions"] = "ms-vipe"
        if self.positions == "rotary" and level == "layer":
            raise ValueError(f"positions=rotary turns q and k; {name} works on tokens: take positions=own or learned")
        if level == "layer":
            self._check_width(name)
        return spec, {key: value for key, value in options.items() if key not in given}

    def _check_width(self, name: str) -> None:
        """A mechanism on tokens projects its own outputs again: heads side by side must be as wide as a token."""
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(f"num_key_value_heads must be num_attention_heads={self.num_attention_heads} with {name}")
        if self.head_dim * self.num_attention_heads != self.hidden_size:
            raise ValueError(
                f"head_dim must be hidden_size / num_attention_heads = {self.hidden_size} / "
                f"{self.num_attention_heads} with {name}, not {self.head_dim}"
            )

    def check_layers(self, *, causal: bool) -> None:
        """Make every layer's mechanism once, so that an impossible combination is refused before anything is built."""
        for index in range(min(self.num_hidden_layers, len(self.specs))):
            spec, options = self.layer_options(index, causal=causal)
            attention(spec, num_heads=self.num_attention_heads, head_dim=self.head_dim, **options)


def _published_positions(spec: str) -> str:
    """How a model of the mechanism's paper knows positions, unless the spec switches the mechanism's own ones off."""
    name, given = split_spec(spec)
    return "learned" if given.get("positions") == "none" else mechanism(name).published_positions


def _unknown(key: str) -> str:
    known = [key for key in SubquadConfig.__annotations__ if not key.startswith("keys_to")] + ["num_labels"]
    near = get_close_matches(key, known, 2, 0.6)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"SubquadConfig has no key {key!r}{hint} (its keys: {', '.join(known)})"


_OF_FILE = "_keys_of_file"  # under this keyword `from_dict` hands over the keys of a file that nobody here knows

# keys that transformers itself writes, hands over or asks for
_ACCEPTED = {
    "_attn_implementation", "_attn_implementation_internal", "_commit_hash", "_experts_implementation", "_name_or_path",
    "_output_attentions", "attn_implementation", "auto_map", "cls_token_id", "experts_implementation",
    "finetuning_task", "mask_token_id", "model_type", "name_or_path", "num_labels", "output_attentions",
    "per_layer_config", "prefix", "quantization_config", "sep_token_id", "task_specific_params", "tokenizer_class",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
