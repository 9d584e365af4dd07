"""Clusters of tokens: running pools, and attention to the query's cluster and to summaries of the others.

    prefix_i = pool of the real tokens ≤ i of i's cluster
    out_i = one softmax over the query's cluster's tokens and, where given, the summaries of the other clusters

`op` has the entrances, schemas and derivatives. The pools run in Numba on a CPU (`cpu`), elsewhere as in `reference`.
The attention is made of products of small matrices (`layout`, `tiles`), on any device. On a CPU it runs in Numba: to
the query's cluster alone as runs of keys (`sorted_runs`), with summaries or one query per cluster in tiles of scores
(`cpu_attention`, `cpu_tiles`); what both leave goes the way of `tiles` (`cpu`). `nearest` says which cluster a
token is in, `meetings` sums over queries and keys that are clustered each for themselves.
"""

from subquad.kernels.clusters.cuda import reads_sizes
from subquad.kernels.clusters.meetings import met_sums
from subquad.kernels.clusters.nearest import nearest_centroids
from subquad.kernels.clusters.op import cluster_attention, cluster_prefix

__all__ = ["cluster_attention", "cluster_prefix", "met_sums", "nearest_centroids", "reads_sizes"]
