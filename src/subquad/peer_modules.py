"""Other implementations of our mechanisms, as modules on tokens (B, n, E): what `subquad bench --peers` measures.

A peer that has no output projection of its own gets one, and sizes (window, landmarks …) are those of ours. A package
is imported when its module is made, never before.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from subquad.bench import Setting
from subquad.core.names import unknown


@dataclass(frozen=True)
class Peer:
    """One other implementation, and what of ours it is held against."""

    name: str
    package: str  # as it is installed
    spec: str  # ours, with the same sizes
    make: Callable[[int, Setting], nn.Module]  # for a length: tokens (B, n, E) → (B, n, E)
    causal: bool = False
    n: int = 4096
    bar: float = 0.7  # ours must take at most this share of the peer's time

    @property
    def module(self) -> str:
        """What is imported."""
        return self.package.replace("-", "_")

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown"


class _Tokens(nn.Module):
    """A peer as a function of tokens: picks its output out of what it returns, and projects it where it does not."""

    def __init__(self, inner: nn.Module, width: int, *, projects: bool = True, **given: Any) -> None:
        super().__init__()
        self.inner, self.given = inner, given
        self.out = None if projects else nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x, **self.given)
        found = found if isinstance(found, Tensor) else found[0]
        return found if self.out is None else self.out(found)


def _width(setting: Setting) -> int:
    return setting.heads * setting.head_dim


def _linear(n: int, s: Setting) -> nn.Module:
    from linear_attention_transformer.linear_attention_transformer import SelfAttention

    return SelfAttention(_width(s), s.heads, causal=False, dim_head=s.head_dim)


def _causal_linear(n: int, s: Setting) -> nn.Module:
    from linear_attention_transformer.linear_attention_transformer import SelfAttention

    return SelfAttention(_width(s), s.heads, causal=True, dim_head=s.head_dim, blindspot_size=64)


def _performer(n: int, s: Setting) -> nn.Module:
    from performer_pytorch import SelfAttention

    return SelfAttention(_width(s), causal=False, heads=s.heads, dim_head=s.head_dim)


def _linformer(n: int, s: Setting) -> nn.Module:
    from linformer import LinformerSelfAttention

    return LinformerSelfAttention(_width(s), n, k=256, heads=s.heads, dim_head=s.head_dim)


def _nystrom(n: int, s: Setting) -> nn.Module:
    from nystrom_attention import NystromAttention

    return NystromAttention(_width(s), dim_head=s.head_dim, heads=s.heads, num_landmarks=64)


def _reformer(n: int, s: Setting) -> nn.Module:
    from reformer_pytorch import LSHSelfAttention

    return LSHSelfAttention(_width(s), heads=s.heads, bucket_size=64, n_hashes=8, causal=s.causal)


def _routing(n: int, s: Setting) -> nn.Module:
    from routing_transformer.routing_transformer import SelfAttention

    inner = SelfAttention(_width(s), 1, n, s.heads, 0, 64, dim_head=s.head_dim, causal=s.causal)
    return _Tokens(inner, _width(s))


def _sinkhorn(n: int, s: Setting) -> nn.Module:
    from sinkhorn_transformer.sinkhorn_transformer import SinkhornSelfAttention

    return SinkhornSelfAttention(_width(s), 64, n, heads=s.heads, dim_head=s.head_dim, sinkhorn_iter=8)


def _hierarchical(n: int, s: Setting) -> nn.Module:
    from h_transformer_1d.h_transformer_1d import CausalHAttention1D, HAttention1D

    about: dict[str, Any] = {"heads": s.heads, "dim_head": s.head_dim, "block_size": 16}
    return CausalHAttention1D(_width(s), max_seq_len=n, **about) if s.causal else HAttention1D(_width(s), **about)


def _local(n: int, s: Setting) -> nn.Module:
    from local_attention import LocalMHA

    return LocalMHA(dim=_width(s), window_size=128, heads=s.heads, dim_head=s.head_dim, causal=s.causal)


def _nsa(n: int, s: Setting) -> nn.Module:
    from native_sparse_attention_pytorch import SparseAttention

    return SparseAttention(
        _width(s), s.head_dim, s.heads, sliding_window_size=512, compress_block_size=32,
        compress_block_sliding_stride=16, selection_block_size=64, num_selected_blocks=15, causal=True,
        compress_mlp=_small_mlp(32 * s.head_dim, s.head_dim),
    )  # fmt: skip


def _small_mlp(length: int, width: int) -> nn.Module:
    """The peer's own default has as many hidden units as inputs; this one is as wide as ours."""
    return nn.Sequential(nn.Flatten(3), nn.Linear(length, width), nn.ReLU(), nn.Linear(width, width))


def _bigbird(n: int, s: Setting) -> nn.Module:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(hidden_size=_width(s), num_attention_heads=s.heads, max_position_embeddings=n, block_size=64)
    masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(s.batch, n), 64)
    names = ("to_blocked_mask", "band_mask", "from_mask", "to_mask")
    given = dict(zip(names, masks, strict=True)) | {"from_blocked_mask": masks[0]}
    return _Tokens(BigBirdBlockSparseAttention(config, seed=0), _width(s), projects=False, **given)


def _longformer(n: int, s: Setting) -> nn.Module:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(hidden_size=_width(s), num_attention_heads=s.heads, attention_window=[128])
    config.attention_probs_dropout_prob = 0.0
    nobody = torch.zeros(s.batch, n, dtype=torch.bool)
    given: dict[str, Any] = {"attention_mask": torch.zeros(s.batch, n), "is_index_masked": nobody}
    given |= {"is_index_global_attn": nobody, "is_global_attn": False}
    return _Tokens(LongformerSelfAttention(config, 0), _width(s), projects=False, **given)


def _nystromformer(n: int, s: Setting) -> nn.Module:
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    config = NystromformerConfig(
        hidden_size=_width(s), num_attention_heads=s.heads, num_landmarks=64, segment_means_seq_len=n,
        conv_kernel_size=33, attention_probs_dropout_prob=0.0, max_position_embeddings=n,
    )  # fmt: skip
    return _Tokens(NystromformerSelfAttention(config), _width(s), projects=False)


def _lsh(n: int, s: Setting) -> nn.Module:
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    config = ReformerConfig(
        hidden_size=_width(s), num_attention_heads=s.heads, attention_head_size=s.head_dim, num_hashes=8,
        lsh_attn_chunk_length=64, num_buckets=2 * n // 64, is_decoder=s.causal, max_position_embeddings=n,
        lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _Tokens(LSHSelfAttention(config, 0), _width(s), projects=False)


class DeepSeek(nn.Module):
    """transformers' eager DeepSeek-V4 attention as a function of tokens: `kind` is "heavily" or "sparse"."""

    def __init__(self, kind: str, n: int, setting: Setting, **options: Any) -> None:
        super().__init__()
        from transformers import DeepseekV4Config
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

        name = {"heavily": "heavily_compressed_attention", "sparse": "compressed_sparse_attention"}[kind]
        width, head_dim = _width(setting), setting.head_dim
        rates = {"heavily_compressed_attention": 128, "compressed_sparse_attention": 4}
        given: dict[str, Any] = {
            "hidden_size": width, "num_attention_heads": setting.heads, "head_dim": head_dim, "q_lora_rank": width,
            "o_groups": 1, "o_lora_rank": width, "num_hidden_layers": 1, "layer_types": [name], "compress_rates": rates,
            "index_n_heads": setting.heads, "index_head_dim": head_dim // 4, "index_topk": 512, "sliding_window": 128,
            "max_position_embeddings": n, "partial_rotary_factor": 0.125, "mlp_layer_types": ["moe"],
        }  # fmt: skip
        self.config = DeepseekV4Config(**(given | options))
        self.config._attn_implementation = "eager"
        self.inner, self.rotary = DeepseekV4Attention(self.config, 0), DeepseekV4RotaryEmbedding(self.config)
        for name_, p in self.inner.named_parameters():  # as the model initialises them; here they are made empty
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
            else:
                nn.init.constant_(p, float("norm" in name_))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        place = torch.arange(n, device=x.device)[None].expand(len(x), n)
        angles = {kind: self.rotary(x, position_ids=place, layer_type=kind) for kind in ("main", "compress")}
        back = place[0, :, None] - place[0]  # (n, n)
        hidden = (back < 0) | (back >= self.config.sliding_window)
        mask = torch.zeros(n, n, dtype=x.dtype, device=x.device).masked_fill_(hidden, -torch.inf)[None, None]
        return self.inner(x, angles, place, mask.expand(len(x), 1, n, n))[0]


def _hca(n: int, s: Setting) -> nn.Module:
    return DeepSeek("heavily", n, s)


def _csa(n: int, s: Setting) -> nn.Module:
    return DeepSeek("sparse", n, s)


PEERS = (
    Peer("linear", "linear-attention-transformer", "linear", _linear),
    Peer("linear-causal", "linear-attention-transformer", "linear", _causal_linear, causal=True),
    Peer("performer", "performer-pytorch", "performer", _performer),
    Peer("linformer", "linformer", "linformer", _linformer),
    Peer("nystrom", "nystrom-attention", "nystrom", _nystrom),
    Peer("reformer", "reformer-pytorch", "reformer", _reformer),
    Peer("reformer-causal", "reformer-pytorch", "reformer", _reformer, causal=True),
    Peer("routing", "routing-transformer", "routing", _routing),
    Peer("sinkhorn", "sinkhorn-transformer", "sinkhorn", _sinkhorn),
    Peer("h-transformer-1d", "h-transformer-1d", "h-transformer-1d", _hierarchical),
    Peer("h-transformer-1d-causal", "h-transformer-1d", "h-transformer-1d", _hierarchical, causal=True),
    Peer("local", "local-attention", "local:window=257", _local),
    Peer("local-causal", "local-attention", "local:window=129", _local, causal=True),
    # it copies the selected keys and values for every query: 16 GiB at 4,096 tokens
    Peer("nsa", "native-sparse-attention-pytorch", "nsa", _nsa, causal=True, n=1024),
    Peer("hf-bigbird", "transformers", "bigbird", _bigbird),
    Peer("hf-longformer", "transformers", "longformer", _longformer),
    Peer("hf-nystromformer", "transformers", "nystrom", _nystromformer),
    Peer("hf-reformer", "transformers", "reformer", _lsh),
    Peer("hf-deepseek-hca", "transformers", "hca", _hca, causal=True, n=8192, bar=0.2),
    Peer("hf-deepseek-csa", "transformers", "csa", _csa, causal=True, n=4096),
)


def find(name: str) -> Peer:
    """The peer of a name, or an error that lists them."""
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise unknown("peer", name, [peer.name for peer in PEERS])
