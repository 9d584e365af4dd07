"""The kernels: blocks (regular pieces), merge (one softmax over several key sets), edges (a CSR edge list)."""
