"""Clusters of tokens: running pools of every cluster, and who attends to whom, each in one pass over the sequence."""

import numba
import numpy as np
import torch
from torch import Tensor

_kernel = numba.njit(parallel=True, cache=True, error_model="numpy")


@_kernel
def _prefix(x, cluster, real, clusters, is_max, out):
    """out[i] = pool of the real tokens ≤ i of i's cluster; 0 when there is none."""
    graphs, n, d = x.shape
    for g in numba.prange(graphs):
        state, count = np.zeros((clusters, d), x.dtype), np.zeros(clusters, np.int64)
        for i in range(n):
            c = cluster[g, i]
            if real[g, i]:
                count[c] += 1
                for f in range(d):
                    if is_max:
                        state[c, f] = x[g, i, f] if count[c] == 1 else max(state[c, f], x[g, i, f])
                    else:
                        state[c, f] += x[g, i, f]
            share = x.dtype.type(1 if is_max else max(1, count[c]))
            for f in range(d):
                out[g, i, f] = state[c, f] / share


@_kernel
def _prefix_backward(grad, x, out, cluster, real, clusters, is_max, dx):
    """Backwards, with what later tokens of a cluster owe to earlier ones; a maximum pays the one that set it."""
    graphs, n, d = x.shape
    for g in numba.prange(graphs):
        owed, count = np.zeros((clusters, d), x.dtype), np.zeros(clusters, np.int64)
        for i in range(n):
            count[cluster[g, i]] += real[g, i]
        for i in range(n - 1, -1, -1):
            c = cluster[g, i]
            share = x.dtype.type(1 if is_max else max(1, count[c]))
            for f in range(d):
                owed[c, f] += grad[g, i, f] / share
                pays = real[g, i] and (not is_max or x[g, i, f] == out[g, i, f])
                dx[g, i, f] = owed[c, f] if pays else 0
                if pays and is_max:
                    owed[c, f] = 0
            count[c] -= real[g, i]


@torch.library.custom_op("subquad::cluster_prefix", mutates_args=())
def cluster_prefix(x: Tensor, cluster: Tensor, real: Tensor, clusters: int, is_max: bool) -> Tensor:
    """The running pool, maximum or mean, of each token's cluster.

    x (G, n, d), cluster int64 (G, n), real bool (G, n) → (G, n, d).
    """
    values, groups, flags = (t.cpu().contiguous().numpy() for t in (x, cluster, real))  # elsewhere: there and back
    out = torch.empty(x.shape, dtype=x.dtype)
    _prefix(values, groups, flags, clusters, is_max, out.numpy())
    return out.to(x.device)


@cluster_prefix.register_fake
def _(x, cluster, real, clusters, is_max):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("subquad::cluster_prefix_backward", mutates_args=())
def cluster_prefix_backward(
    grad: Tensor, x: Tensor, out: Tensor, cluster: Tensor, real: Tensor, clusters: int, is_max: bool
) -> Tensor:
    given, values, pools, groups, flags = (t.cpu().contiguous().numpy() for t in (grad, x, out, cluster, real))
    dx = torch.empty(x.shape, dtype=x.dtype)
    _prefix_backward(given, values, pools, groups, flags, clusters, is_max, dx.numpy())
    return dx.to(x.device)


@cluster_prefix_backward.register_fake
def _(grad, x, out, cluster, real, clusters, is_max):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx, inputs, output):
    x, cluster, real, ctx.clusters, ctx.is_max = inputs
    ctx.save_for_backward(x, output, cluster, real)


def _backward(ctx, grad):
    return cluster_prefix_backward(grad, *ctx.saved_tensors, ctx.clusters, ctx.is_max), None, None, None, None


cluster_prefix.register_autograd(_backward, setup_context=_save)


# ---- edges --------------------------------------------------------------------------------------------------


@numba.njit(cache=True)
def _members(cluster, real, clusters):
    """The real tokens sorted by cluster, each cluster ascending; cluster c owns members[start[c] : start[c + 1]]."""
    start = np.zeros(clusters + 1, np.int64)
    for i in range(cluster.size):
        start[cluster[i] + 1] += real[i]
    start = np.cumsum(start)
    place, members = start.copy(), np.empty(start[-1], np.int64)
    for i in range(cluster.size):
        if real[i]:
            members[place[cluster[i]]] = i
            place[cluster[i]] += 1
    return members, start


@numba.njit(cache=True)
def _move_to_end(recent, met, c):
    """`recent[:met]` lists clusters by their last token: c is the latest now. Returns the new length."""
    at = met
    for r in range(met):
        if recent[r] == c:
            at = r
            break
    met = max(met, at + 1)
    for r in range(at, met - 1):
        recent[r] = recent[r + 1]
    recent[met - 1] = c
    return met


@numba.njit(cache=True)
def _walk(cluster, real, clusters, causal, ptr, ids, main_ptr, main_ids, count_only):
    """One graph: the rows of the summaries and of the queries, in ascending order.

    A first walk counts the edges of row i into ptr[i + 1] and main_ptr[i + 1], a second one writes them.
    """
    n = cluster.size
    members, start = _members(cluster, real, clusters)
    recent, met = np.empty(clusters, np.int64), 0
    seen = np.zeros(clusters, np.int64)  # tokens of each cluster that may be seen now
    if not causal:
        seen[:] = start[1:] - start[:-1]
        for token in np.sort(members):
            met = _move_to_end(recent, met, cluster[token])
    for i in range(n):
        c = cluster[i]
        if causal and real[i]:
            seen[c] += 1
            met = _move_to_end(recent, met, c)
        own = seen[c]
        stands_here = real[i] and (causal or members[start[c + 1] - 1] == i)
        summary = own if stands_here else 0
        if not count_only:
            for e in range(summary):
                ids[ptr[i] + e] = members[start[c] + e]
            for e in range(own):
                main_ids[main_ptr[i] + e] = members[start[c] + e]
        edges = own
        for r in range(met):
            other = recent[r]
            if other != c:
                if not count_only:
                    main_ids[main_ptr[i] + edges] = n + members[start[other] + seen[other] - 1]
                edges += 1
        if count_only:
            ptr[i + 1], main_ptr[i + 1] = summary, edges


@_kernel
def _walk_all(cluster, real, clusters, causal, ptr, ids, main_ptr, main_ids, count_only):
    for g in numba.prange(cluster.shape[0]):
        _walk(cluster[g], real[g], clusters, causal, ptr[g], ids, main_ptr[g], main_ids, count_only)


@torch.library.custom_op("subquad::cluster_edges", mutates_args=())
def cluster_edges(cluster: Tensor, real: Tensor, clusters: int, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two edge lists of G graphs: summaries → members, and queries → own members and n + (where summaries stand).

    cluster int64 (G, n), real bool (G, n). A summary stands at a token and holds its cluster up to it (causal), or
    stands at the cluster's last token and holds all of it. Returns indptr (G, n + 1) and indices, twice.
    """
    groups, flags = (t.cpu().contiguous().numpy() for t in (cluster, real))
    g, n = groups.shape
    counts = [np.zeros((g, n + 1), np.int64) for _ in range(2)]
    none = np.empty(0, np.int32)
    _walk_all(groups, flags, clusters, causal, counts[0], none, counts[1], none, True)
    pointers, indices = [], []
    for count in counts:
        ends = np.cumsum(count[:, 1:]).reshape(g, n)
        pointer = np.empty((g, n + 1), np.int64)
        pointer[:, 1:] = ends
        pointer[:, 0] = np.concatenate((np.zeros(1, np.int64), ends[:-1, -1]))
        pointers.append(pointer)
        indices.append(np.empty(ends[-1, -1], np.int32))
    _walk_all(groups, flags, clusters, causal, pointers[0], indices[0], pointers[1], indices[1], False)
    starts, ids = ([torch.from_numpy(x).to(cluster.device) for x in found] for found in (pointers, indices))
    return starts[0], ids[0], starts[1], ids[1]


@cluster_edges.register_fake
def _(cluster, real, clusters, causal):
    g, n = cluster.shape
    sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(2)]
    pointer = lambda: cluster.new_empty(g, n + 1)  # noqa: E731
    index = lambda size: cluster.new_empty(size, dtype=torch.int32)  # noqa: E731
    return pointer(), index(sizes[0]), pointer(), index(sizes[1])
