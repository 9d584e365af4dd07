"""The configuration of every subquad model: one class, whatever the attention inside."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from subquad.attention.registry import attention, mechanism
from subquad.core.numbers import root
from subquad.core.options import split_spec
from subquad.supports.spans import default_span

POSITIONS = ("learned", "sinusoidal", "rotary", "own", "none")


class SubquadConfig(PreTrainedConfig):
    """What a model is made of.

    `attention` is a spec such as "combiner-fixed:span=64", or a list of specs that the layers take in turn (a
    shorter list is repeated: ["full", "strided:w=32"] alternates dense and sparse). `positions`: learned or
    sinusoidal embeddings, rotary (turns q and k, for mechanisms on q, k, v), own (the mechanism's: MS-VIPE) or none.
    `cols` says that the sequence is a picture with rows of so many tokens; mechanisms on a grid take it from here.
    `density_weight` is λ of the SBM density loss. An unknown key is an error.
    """

    model_type = "subquad"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["density"]

    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int = 512
    max_position_embeddings: int = 1024
    attention: str | list[str] = "full"
    positions: str = "learned"
    norm: str = "pre"
    hidden_act: str = "gelu"
    pooling: str = "mean"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    type_vocab_size: int = 0
    density_weight: float = 0.0
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
    use_cache: bool = False

    def __post_init__(self, **extra: Any) -> None:
        unknown = set(extra) - _ACCEPTED
        if unknown:
            known = ", ".join([*SubquadConfig.__annotations__, "num_labels"])
            raise TypeError(f"SubquadConfig has no key {sorted(unknown)[0]!r} (its keys: {known})")
        super().__post_init__(**extra)
        self.check()

    def check(self) -> None:
        """Refuse what no model can be made of, by the name of the key."""
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                    "max_position_embeddings"):  # fmt: skip
            if not isinstance(getattr(self, key), int) or getattr(self, key) < 1:
                raise ValueError(f"{key} must be an integer ≥ 1, not {getattr(self, key)!r}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads={self.num_attention_heads}, "
                f"not {self.hidden_size}"
            )
        for key, allowed in (("positions", POSITIONS), ("norm", ("pre", "post")), ("pooling", ("mean", "cls"))):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} must be one of {', '.join(allowed)}, not {getattr(self, key)!r}")
        if self.positions == "rotary" and (self.hidden_size // self.num_attention_heads) % 2:
            width = self.hidden_size // self.num_attention_heads
            raise ValueError(f"positions=rotary needs heads of even width, not {width}")
        if not self.attention or not all(isinstance(spec, str) for spec in self.specs):
            raise ValueError(f"attention must be a spec or a list of specs, not {self.attention!r}")
        for spec in set(self.specs):
            mechanism(split_spec(spec)[0])  # an unknown name is an error here, not in the first layer

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
        options.update(settled_sizes(known, given, self.max_position_embeddings))
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
        return spec, {key: value for key, value in options.items() if key not in given}

    def check_attention(self, *, causal: bool) -> None:
        """Make every layer's mechanism once, so that an impossible combination is refused before anything is built."""
        width = self.hidden_size // self.num_attention_heads
        for index in range(min(self.num_hidden_layers, len(self.specs))):
            spec, options = self.layer_options(index, causal=causal)
            attention(spec, num_heads=self.num_attention_heads, head_dim=width, **options)


def settled_sizes(known: dict[str, Any], given: dict[str, str], n: int) -> dict[str, int]:
    """Sizes that a mechanism derives from the length of each batch, derived once from the longest: how far a batch is
    padded must not change a model's answer.
    """
    depth = int(given.get("depth", known["depth"].default)) if "depth" in known else 1
    sizes = {"span": max(default_span(n, depth), 2), "cols": root(n), "w": root(n)}
    return {name: size for name, size in sizes.items() if name in known and known[name].default is None}


# keys that transformers itself writes or hands over
_ACCEPTED = {
    "_attn_implementation", "_attn_implementation_internal", "_commit_hash", "_experts_implementation", "_name_or_path",
    "_output_attentions", "attn_implementation", "experts_implementation", "model_type", "name_or_path", "num_labels",
    "torch_dtype", "transformers_version",
}  # fmt: skip
