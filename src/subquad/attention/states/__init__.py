"""Streaming: the state of a causal mechanism between calls, and how more tokens extend it.

    state = a.start(batch_size)                          an empty state
    y, state = a.extend(q, k, v, state, key_mask=None)   t ≥ 1 new slots per row → (B, H, t, d)

`state` has what every state is and does, `entrance` the two calls above. What a mechanism keeps is a `Memory`:
`replay` keeps everything and calls the mechanism on the whole again; the others keep what a future query can name.
"""

from subquad.attention.states.state import Chunk, Memory, State

__all__ = ["Chunk", "Memory", "State"]
