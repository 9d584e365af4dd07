"""Measurement against other implementations of the same mechanism: the packages of the extra `peers`, and transformers.

    for rows in measure_peers(["performer", "hca"], Setting(backward=True)): ...

Each of ours is a `MultiheadAttention` layer and each peer a module on tokens (B, n, E), with its projections; a peer
that has no output projection of its own gets one. A round runs full attention, ours and the peer one after the other,
so that a slow moment of the machine hits all of them; the best of several rounds counts. So do the four projections
alone: their share of the peer's time is the least that a ratio can be where nothing of them can be saved. Sizes
(window, landmarks …) are the same on both sides. No peer is imported before it is measured, and nothing else in the
package imports one.

crossover: the shortest of the lengths 256, 512, … at which our layer is faster than a layer of full attention, and also
at the next one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from subquad.bench import FULL, Setting, Step, make_inputs, make_step
from subquad.bench import report as bench_report

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)  # where a crossover is looked for
SECONDS = 1.0  # a crossover is looked for no further than the length at which one step takes longer


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


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    """Seconds of one step; `ratio` = seconds / peer_seconds."""

    peer: str
    package: str
    version: str
    spec: str
    causal: bool
    backward: bool
    n: int
    repeats: int
    seconds: float
    peer_seconds: float
    full_seconds: float
    ratio: float
    bar: float
    projections_seconds: float  # of the four projections alone, which both sides have
    crossover: int | None = None  # None = none of the lengths tried
    tried: tuple[int, ...] = ()  # lengths at which a crossover was looked for


# ---- the peers ----------------------------------------------------------------------------------------------


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


class Projections(nn.Module):
    """What no layer can do without: queries, keys and values in one product, and the output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x)[..., : x.shape[2]])


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
    raise ValueError(f"no peer is called {name!r}; the peers are {', '.join(peer.name for peer in PEERS)}")


# ---- a run ------------------------------------------------------------------------------------------------


def measure_peers(
    names: Sequence[str],
    setting: Setting,
    *,
    n: int | None = None,
    repeats: int = 3,
    crossover: bool = True,
    tell: Callable[[str], None] = lambda what: None,
) -> Iterator[list[PeerRow]]:
    """All rows so far, after every peer. `names`: peers, all if empty; `n`: a length for all of them."""
    chosen = [find(name) for name in names] or [peer for peer in PEERS if peer.installed]
    for peer in chosen:
        if not peer.installed:
            raise ValueError(f"{peer.name} needs the package {peer.package}: pip install 'subquad[peers]'")
    rows: list[PeerRow] = []
    for peer in chosen:
        rows.append(_measure(peer, replace(setting, causal=peer.causal), n or peer.n, repeats, tell))
        yield list(rows)
        if crossover:
            same = [row for row in rows[:-1] if (row.spec, row.causal) == (peer.spec, peer.causal)]
            found = same[0] if same else _with_crossover(rows[-1], replace(setting, causal=peer.causal), repeats, tell)
            rows[-1] = replace(rows[-1], crossover=found.crossover, tried=found.tried)
            yield list(rows)


def peer_step(peer: Peer, n: int, setting: Setting, data: tuple[list[Tensor], Tensor | None]) -> Step:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # some talk while they are imported
        warnings.simplefilter("ignore")
        module = peer.make(n, setting).train(setting.backward)
    return Step(peer.name, "head", module, *data)


def _measure(peer: Peer, setting: Setting, n: int, repeats: int, tell: Callable[[str], None]) -> PeerRow:
    data = make_inputs("layer", n, setting)
    subjects = [make_step(spec, "layer", n, setting, data) for spec in (FULL, peer.spec)]
    subjects.append(peer_step(peer, n, setting, data))
    subjects.append(Step("projections", "head", Projections(_width(setting)).to(**setting.place), *data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(repeats + 1):  # the first one warms up
            for subject in subjects:
                tell(f"{peer.name} at n = {n:,}, {f'round {turn}' if turn else 'first call'}")
                if turn:
                    subject.clock()
                else:
                    subject()
    full, ours, theirs, projections = (subject.seconds for subject in subjects)
    return PeerRow(
        peer=peer.name, package=peer.package, version=peer.version, spec=peer.spec, causal=peer.causal, n=n,
        backward=setting.backward, repeats=repeats, seconds=ours, peer_seconds=theirs, full_seconds=full,
        ratio=ours / theirs, bar=peer.bar, projections_seconds=projections,
    )  # fmt: skip


def _with_crossover(row: PeerRow, setting: Setting, repeats: int, tell: Callable[[str], None]) -> PeerRow:
    faster: dict[int, bool] = {}
    for n in LENGTHS:
        data = make_inputs("layer", n, setting)
        full, ours = (make_step(spec, "layer", n, setting, data) for spec in (FULL, row.spec))
        for subject in (full, ours):
            tell(f"{row.spec} at n = {n:,}, crossover")
            subject()
        for subject in [full, ours] * repeats:
            subject.clock()
        faster[n] = ours.seconds < full.seconds
        if max(full.seconds, ours.seconds) > SECONDS or list(faster.values())[-2:] == [True, True]:
            break
    from_here = [n for n in faster if all(faster[m] for m in faster if m >= n)]
    return replace(row, crossover=min(from_here, default=None), tried=tuple(faster))


def report(rows: Sequence[PeerRow], setting: Setting) -> dict[str, Any]:
    """Rows and the circumstances, ready for JSON."""
    content = bench_report([], setting)
    content["machine"] |= {"processor": _processor(), "cores": os.cpu_count()}
    for name in ("causal", "backward"):  # a matter of each row
        content["setting"].pop(name)
    return content | {"rows": [asdict(row) for row in rows]}


def _processor() -> str:
    """The processor's name, where the system tells it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


# ---- for the documentation ----


def as_markdown(content: dict[str, Any]) -> str:
    """The table of a file of results: ours over the peer's time, forward and forward + backward."""
    rows: dict[tuple[str, int], dict[bool, dict[str, Any]]] = {}
    for row in content["rows"]:
        rows.setdefault((row["peer"], row["n"]), {})[row["backward"]] = row
    machine, setting = content["machine"], content["setting"]
    lines = [
        f"{machine['processor']}, {machine['threads']} threads, torch {content['versions']['torch']}; batch "
        f"{setting['batch']}, {setting['heads']} heads × {setting['head_dim']}, float32.",
        "",
        "| peer | package | ours | n | forward, ms: ours / peer | ratio | least | + backward, ms | ratio | least "
        "| pays from |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, n), both in rows.items():
        one = both.get(False) or both[True]
        pays = "–" if not one["tried"] else str(one["crossover"] or f"beyond {one['tried'][-1]}")
        package, way = f"{one['package']} {one['version']}", ", causal" if one["causal"] else ""
        cells = " | ".join(_cells(both.get(backward)) for backward in (False, True))
        lines.append(f"| {name} | {package} | `{one['spec']}`{way} | {n} | {cells} | {pays} |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any] | None) -> str:
    """Times, their ratio, and the share of the projections in the peer's time."""
    if row is None:
        return "– | – | –"
    times = f"{_ms(row['seconds'])} / {_ms(row['peer_seconds'])}"
    return f"{times} | {row['ratio']:.2f} | {row['projections_seconds'] / row['peer_seconds']:.2f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.1f}"


if __name__ == "__main__":
    import json
    import sys
    from pathlib import Path

    print(as_markdown(json.loads(Path(sys.argv[1]).read_text())), end="")
