"""Agreement with other implementations on shared weights, and where they go wrong. Skipped where a peer is missing.

pip install 'subquad[peers]'
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import subquad
from subquad import peer_modules, peers
from subquad.bench import Setting
from subquad.cli.peers import peer_names
from subquad.layers import MultiheadAttention

pytestmark = pytest.mark.filterwarnings("ignore")  # what other packages warn of while they are imported and run
RESULTS = Path(__file__).parents[1] / "docs/results/peers.json"
close = torch.testing.assert_close
ABOUT = {"atol": 1e-4, "rtol": 1e-4}


def package(name: str, module: str | None = None):
    """The module of a peer, or a skip that says what is missing."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name.replace('_', '-')} is not installed: pip install 'subquad[peers]'")
    return importlib.import_module(module or name)


def heads(n: int, d: int = 8, h: int = 2, batch: int = 2, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, h, n, d, generator=draw) for _ in range(3)]


def tokens(n: int, width: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, n, width, generator=torch.Generator().manual_seed(0))


def mechanism(spec: str, d: int = 8, h: int = 2, **options):
    return subquad.attention(spec, num_heads=h, head_dim=d, **options).eval()


def layer(spec: str, weights: list[torch.Tensor], out: nn.Linear | torch.Tensor, h: int = 2, **options):
    """Our layer with these query, key and value matrices and output projection, without biases at the entrance."""
    module = MultiheadAttention(16, h, batch_first=True, bias=True, attention=spec, **options).eval()
    with torch.no_grad():
        module.in_proj_bias.zero_()
        if module.in_proj_weight is not None:
            module.in_proj_weight.copy_(torch.cat(weights))
        else:
            for name, weight in zip("qkv", weights, strict=True):
                getattr(module, f"{name}_proj_weight").copy_(weight)
        module.out_proj.weight.copy_(out.weight if isinstance(out, nn.Linear) else out)
        module.out_proj.bias.zero_()
        if isinstance(out, nn.Linear) and out.bias is not None:
            module.out_proj.bias.copy_(out.bias)
    return module


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, x, x, need_weights=False)[0]


# ---- kernels ----


@pytest.mark.parametrize("causal", [False, True])
def test_linear_sums_agree_with_performer_pytorch(causal):
    peer = package("performer_pytorch", "performer_pytorch.performer_pytorch")
    q, k, v = heads(48)
    a, b = (F.elu(x) + 1 for x in (q, k))
    theirs = peer.causal_linear_attention_noncuda(a, b, v, chunk_size=4) if causal else peer.linear_attention(a, b, v)
    close(mechanism("linear", causal=causal)(q, k, v), theirs, **ABOUT)


@pytest.mark.parametrize("causal", [False, True])
def test_performer_agrees_on_the_same_features(causal):
    peer = package("performer_pytorch", "performer_pytorch.performer_pytorch")
    ours, (q, k, v) = mechanism("performer:epsilon=0", causal=causal), heads(48)
    about = {"projection_matrix": ours.projection, "eps": 0.0}
    a, b = peer.softmax_kernel(q, is_query=True, **about), peer.softmax_kernel(k, is_query=False, **about)
    theirs = peer.causal_linear_attention_noncuda(a, b, v, eps=0) if causal else peer.linear_attention(a, b, v)
    close(ours(q, k, v), theirs, **ABOUT)


@pytest.mark.parametrize("causal", [False, True])
def test_performer_with_relu_agrees_on_the_same_features(causal):
    peer = package("performer_pytorch", "performer_pytorch.performer_pytorch")
    ours, (q, k, v) = mechanism("performer:kernel=relu,epsilon=1e-3", causal=causal), heads(48)
    a, b = (peer.generalized_kernel(x, projection_matrix=ours.projection) for x in (q, k))
    theirs = peer.causal_linear_attention_noncuda(a, b, v, eps=0) if causal else peer.linear_attention(a, b, v)
    close(ours(q, k, v), theirs, **ABOUT)


def test_a_later_key_changes_an_earlier_output_of_performer_pytorch_and_not_of_ours():
    peer = package("performer_pytorch")
    theirs = peer.FastAttention(8, causal=True)
    ours, (q, k, v) = mechanism("performer", causal=True), heads(48)
    loud = k.clone()
    loud[:, :, -1] *= 8
    change = {name: (f(q, loud, v) - f(q, k, v))[:, :, :-1].abs().max() for name, f in (("it", theirs), ("we", ours))}
    assert change["we"] == 0 and change["it"] > 1e-3, f"its largest exponent is taken over the future too: {change}"


# ---- low rank ----


def test_linformer_agrees_on_shared_weights():
    theirs = package("linformer").LinformerSelfAttention(16, 48, k=6, heads=2).eval()
    ours = layer("linformer:k=6", [m.weight for m in (theirs.to_q, theirs.to_k, theirs.to_v)], theirs.to_out,
                 max_length=48)  # fmt: skip
    with torch.no_grad():
        ours.attention.project_keys.copy_(theirs.proj_k.T[None])
        ours.attention.project_values.copy_(theirs.proj_v.T[None])
    for n in (48, 31):
        close(run(ours, tokens(n)), theirs(tokens(n)), **ABOUT)


def test_padding_changes_the_output_of_linformer_and_not_of_ours():
    theirs = package("linformer").LinformerSelfAttention(16, 48, k=6, heads=2).eval()
    ours = MultiheadAttention(16, 2, batch_first=True, attention="linformer:k=6", max_length=48).eval()
    x = tokens(48)
    padded = torch.arange(48).expand(2, 48) >= 30
    other = torch.where(padded[..., None], 3.0, x)  # it takes no mask: whatever stands there is a token
    assert (theirs(other) - theirs(x))[:, :30].abs().max() > 1e-2
    pair = [ours(y, y, y, key_padding_mask=padded, need_weights=False)[0][:, :30] for y in (x, other)]
    close(*pair, atol=0, rtol=0)


def nystrom_pair(iterations: int):
    torch.manual_seed(0)
    theirs = package("nystrom_attention").NystromAttention(
        16, dim_head=8, heads=2, num_landmarks=8, pinv_iterations=iterations
    )
    spec = f"nystrom:landmarks=8,iterations={iterations}"
    ours = layer(spec, list(theirs.to_qkv.weight.chunk(3)), theirs.to_out[0])
    with torch.no_grad():
        ours.attention.filters.copy_(theirs.res_conv.weight[..., 0])
    return ours, theirs.eval()


def test_nystrom_agrees_on_shared_weights():
    ours, theirs = nystrom_pair(30)  # until both pseudo-inverses have arrived: they start from other norms
    x = tokens(64).double()  # an inverse that is not rounded to death: ours is computed in float64 in any case
    close(run(ours.double(), x), theirs.double()(x), **ABOUT)


def test_sequences_of_a_batch_change_each_other_in_nystrom_attention_and_not_in_ours():
    ours, theirs = nystrom_pair(2)
    x = tokens(64)
    other = torch.stack([x[0], 5 * x[1]])
    assert (theirs(other) - theirs(x))[0].abs().max() > 1e-4
    close(run(ours, other)[0], run(ours, x)[0], atol=1e-6, rtol=0)


# ---- windows and blocks ----


def test_local_agrees_with_local_attention():
    peer = package("local_attention")
    theirs = peer.LocalAttention(
        window_size=6, causal=True, exact_windowsize=True, autopad=True, use_rotary_pos_emb=False
    )
    q, k, v = heads(41)
    close(mechanism("local:window=7", causal=True)(q, k, v), theirs(q, k, v), **ABOUT)  # it counts the neighbours


def test_longformer_agrees_with_transformers():
    package("transformers")
    theirs = peers.find("hf-longformer").make(64, Setting(heads=2, head_dim=8, batch=2)).inner.eval()
    theirs.one_sided_attn_window_size = 4
    ours = layer("longformer:window=8", [m.weight for m in (theirs.query, theirs.key, theirs.value)], torch.eye(16))
    with torch.no_grad():
        ours.in_proj_bias.copy_(torch.cat([m.bias for m in (theirs.query, theirs.key, theirs.value)]))
    nobody = torch.zeros(2, 64, dtype=torch.bool)
    found = theirs(tokens(64), attention_mask=torch.zeros(2, 64), is_index_masked=nobody,
                   is_index_global_attn=nobody, is_global_attn=False)[0]  # fmt: skip
    close(run(ours, tokens(64)), found, **ABOUT)


def test_bigbird_agrees_with_transformers_on_its_own_blocks():
    package("transformers")
    n, block = 96, 8
    theirs = peers.find("hf-bigbird").make(n * 8, Setting(heads=2, head_dim=8, batch=2)).inner
    from transformers.models.big_bird.modeling_big_bird import BigBirdModel

    theirs.block_size = block
    masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(2, n), block)
    theirs.train()  # in evaluation it draws no blocks; there is no dropout in it
    out, weights = theirs(tokens(n), *[masks[i] for i in (1, 2, 3, 0, 0)])
    q, k, v = (m(tokens(n)).unflatten(-1, (2, 8)).transpose(1, 2) for m in (theirs.query, theirs.key, theirs.value))
    for h in range(2):  # each head draws its own blocks
        seen = weights[0, h] > 0
        assert 0.2 < seen.float().mean() < 0.8
        ours = subquad.attention("pattern", num_heads=1, head_dim=8, sets=seen)
        one = slice(h, h + 1)
        close(ours(q[:, one], k[:, one], v[:, one])[:, 0], out[..., 8 * h : 8 * h + 8], **ABOUT)


# ---- hashing ----


@pytest.mark.parametrize("causal", [False, True])
def test_reformer_with_one_bucket_is_full_attention_with_shared_queries(causal):
    peer = package("reformer_pytorch")
    theirs = peer.LSHSelfAttention(16, heads=2, causal=causal, use_full_attn=True).eval()
    weights = [theirs.toqk.weight, torch.zeros(16, 16), theirs.tov.weight]
    ours = layer("reformer:buckets=1,rounds=2", weights, theirs.to_out, causal=causal)
    close(run(ours, tokens(33)), theirs(tokens(33)), **ABOUT)


def change_of_the_past(f) -> float:
    """How much the first 56 outputs differ between two sequences whose last 8 of 64 tokens differ."""
    x, outs = tokens(64), []
    moved = x.clone()
    moved[:, -8:] = moved[:, -8:].flip(0)
    for y in (x, moved):
        torch.manual_seed(3)
        outs.append(f(y)[:, :-8])
    return (outs[0] - outs[1]).abs().max().item()


def test_a_later_token_changes_an_earlier_output_of_reformer_pytorch_and_not_of_ours():
    peer = package("reformer_pytorch")
    theirs = peer.LSHSelfAttention(16, heads=2, causal=True, bucket_size=4, n_hashes=1).eval()
    ours = MultiheadAttention(16, 2, batch_first=True, attention="reformer:chunk=4,rounds=1", causal=True).eval()
    assert change_of_the_past(lambda y: run(ours, y)) == 0
    why = "chunks of the whole sorted sequence depend on how many later tokens sort before"
    assert change_of_the_past(theirs) > 1e-3, why


def test_a_later_token_changes_an_earlier_output_of_routing_transformer_and_not_of_ours():
    peer = package("routing_transformer", "routing_transformer.routing_transformer")
    torch.manual_seed(0)
    theirs = peer.SelfAttention(16, 1, 64, 2, 0, 8, dim_head=8, causal=True).eval()
    theirs(tokens(64))  # its first call makes the centroids
    ours = MultiheadAttention(16, 2, batch_first=True, attention="routing:clusters=8", causal=True).eval()
    assert change_of_the_past(lambda y: run(ours, y)) == 0
    why = "a cluster takes the tokens nearest to its centroid, and later ones drive earlier ones out"
    assert change_of_the_past(lambda y: theirs(y)[0]) > 1e-3, why


# ---- selected blocks ----


@pytest.mark.parametrize("branch", [1, 2])
def test_nsa_agrees_where_all_blocks_are_selected(branch):
    """The selected branch and the window. The compressed branches differ: that of the peer has a memory, and its blocks
    begin before the sequence."""
    peer = package("native_sparse_attention_pytorch")
    sizes = {"compress_block_size": 4, "compress_block_sliding_stride": 4, "selection_block_size": 4}
    sizes |= {"sliding_window_size": 6, "num_selected_blocks": 12}
    theirs = peer.SparseAttention(16, 8, 2, norm=False, causal=True, **sizes)
    theirs.rotary_emb.rotate_queries_with_cached_keys = lambda q, k: (q, k)
    gates = torch.full((2, 3), -30.0)
    gates[:, branch] = 30.0
    spec = "nsa:compress=4,stride=4,block=4,topk=12,window=7"
    ours = layer(spec, list(theirs.to_qkv.weight.chunk(3)), theirs.combine_heads, causal=True)
    with torch.no_grad():
        theirs.to_strategy_combine[0].bias.copy_(gates.flatten())
        ours.attention.gate_bias.copy_(gates)
    close(run(ours, tokens(48)), theirs.eval()(tokens(48)), **ABOUT)


def test_moba_on_all_blocks_is_full_attention():
    q, k, v = heads(48)
    full = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(mechanism("moba:block=8,topk=6", causal=True)(q, k, v), full, **ABOUT)


# ---- DeepSeek-V4 ----


def deepseek_pair(kind: str):
    package("transformers")
    rates = {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4}
    about = {"sliding_window": 6, "compress_rates": rates, "index_topk": 5, "index_head_dim": 4, "index_n_heads": 8}
    torch.manual_seed(1)
    theirs = peer_modules.DeepSeek(kind, 64, Setting(heads=2, head_dim=8), partial_rotary_factor=0.25, **about)
    a = theirs.inner
    for name, p in theirs.inner.named_parameters():
        if p.dim() > 1 and "bias" not in name:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
        else:
            nn.init.normal_(p, mean=float("norm" in name), std=0.3)
    low = a.q_a_norm.weight[:, None] * a.q_a_proj.weight  # its norm is a factor per token, which a later norm takes out
    spec = "hca:rate=8" if kind == "heavily" else "csa:rate=4,topk=5,index_dim=4,index_heads=8"
    ours = layer(
        spec + ",window=6,rotary=2", [a.q_b_proj.weight @ low, a.kv_proj.weight, a.kv_proj.weight],
        a.o_b_proj.weight @ a.o_a_proj.weight, causal=True, num_kv_heads=1,
    )  # fmt: skip
    mine, c = ours.attention, a.compressor
    copies = [(mine.norm, a.kv_norm.weight), (mine.sinks, a.sinks), *compressors(mine.compress, c)]
    if kind == "sparse":
        copies += [
            *compressors(mine.index.compress, c.indexer),
            (mine.index.gates.weight, c.indexer.scorer.weights_proj.weight),
        ]
        copies += [(mine.index.queries.weight, c.indexer.q_b_proj.weight @ low)]
    with torch.no_grad():
        for to, from_ in copies:
            to.copy_(from_)
    return ours, theirs.eval()


def compressors(mine, theirs):
    return [(mine.values.weight, theirs.kv_proj.weight), (mine.gates.weight, theirs.gate_proj.weight),
            (mine.bias, theirs.position_bias), (mine.norm, theirs.kv_norm.weight)]  # fmt: skip


@pytest.mark.parametrize("kind", ["heavily", "sparse"])
@pytest.mark.parametrize("n", [1, 7, 8, 61])
def test_compressed_attention_is_that_of_transformers(kind, n):
    ours, theirs = deepseek_pair(kind)
    x = tokens(n)
    close(run(ours, x), theirs(x), **ABOUT)


@pytest.mark.parametrize("kind", ["heavily", "sparse"])
def test_gradients_of_compressed_attention_are_those_of_transformers(kind):
    ours, theirs = deepseek_pair(kind)
    x, y = tokens(37).requires_grad_(), tokens(37).requires_grad_()
    direction = torch.randn(2, 37, 16, generator=torch.Generator().manual_seed(5))
    run(ours, x).backward(direction)
    theirs(y).backward(direction)
    close(x.grad, y.grad, atol=1e-3, rtol=1e-3)
    close(ours.attention.sinks.grad, theirs.inner.sinks.grad, atol=1e-3, rtol=1e-3)


# ---- the measurement ----


def test_rows_of_peers_hold_both_times_and_the_crossover(monkeypatch):
    package("transformers")
    monkeypatch.setattr(peers, "LENGTHS", (64, 128))
    setting = Setting(heads=2, head_dim=8, backward=True)
    *_, rows = peers.measure_peers(["hf-longformer"], setting, n=256, repeats=1)
    (row,) = rows
    assert (row.peer, row.n, row.backward, row.tried) == ("hf-longformer", 256, True, (64, 128))
    assert row.ratio == pytest.approx(row.seconds / row.peer_seconds) and row.full_seconds > 0
    assert row.crossover in (None, 64, 128)
    content = json.loads(json.dumps(peers.report(rows, setting)))
    assert content["machine"]["threads"] >= 1 and "hf-longformer" in peers.as_markdown(content)


def test_unknown_and_missing_peers_are_named(monkeypatch):
    with pytest.raises(ValueError, match=r"unknown peer 'nobody'.*available: linear, "):
        list(peers.measure_peers(["nobody"], Setting()))
    monkeypatch.setattr(peer_modules.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="performer needs the package performer-pytorch"):
        list(peers.measure_peers(["performer"], Setting()))


def test_the_command_knows_every_peer():
    assert peer_names() == [peer.name for peer in peers.PEERS]


def test_importing_the_package_imports_no_peer():
    import subprocess
    import sys

    names = sorted({peer.module for peer in peers.PEERS} - {"transformers"})
    code = f"import sys, subquad.peers; print([n for n in {names} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_row_of_an_older_file_has_no_share_of_the_projections():
    about = {"peer": "nsa", "package": "p", "version": "1", "spec": "nsa", "causal": True, "n": 64, "tried": []}
    row = about | {"backward": False, "seconds": 0.02, "peer_seconds": 0.04, "ratio": 0.5}
    content = peers.report([], Setting()) | {"rows": [row, row | {"n": 128, "projections_seconds": 0.01}]}
    older, newer = peers.as_markdown(content).splitlines()[-2:]
    assert "| 20 / 40 | 0.50 | – |" in older and "| 20 / 40 | 0.50 | 0.25 |" in newer


def test_the_documentation_has_the_table_of_the_results():
    page = (Path(__file__).parents[1] / "docs/baselines.md").read_text()
    assert peers.as_markdown(json.loads(RESULTS.read_text())).strip() in page
