"""MS-VIPE, the multi-scale volatile instant positional embedding (Composite Slice Transformer, section 4.2).

    local   P_l (αL, D)     by place in the extended slice, the same for every slice
    global  P_g (N/L, D)    by slice

They are added to what queries and keys are projected from, at every layer, never to values: position tells a
layer where to look and is not carried on. All layers of a model share them, (αL + N/L)·D numbers, not N·D.

The choices made: N/L is rounded up; with more than two scales every scale but the coarsest has a local table
and the coarsest the global one; a longer sequence is an error, or with `interpolate` the rows of P_g are
stretched linearly over the slices there are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.core.numbers import is_symbolic, settled


class MultiScalePositions(nn.Module):
    """The tables of MS-VIPE: `positions(scale, n)` gives the rows for a sequence of n at that scale.

    `local` is αL (0: local mixing without positions), `slices` the N/L^(scales-1) rows of the global one.
    """

    def __init__(self, width: int, *, local: int, slices: int, scales: int = 2, interpolate: bool = False) -> None:
        super().__init__()
        self.local = nn.ParameterList(
            nn.Parameter(torch.empty(local, width)) for _ in range(scales - 1 if local else 0)
        )
        self.globe = nn.Parameter(torch.empty(slices, width))
        self.scales, self.interpolate = scales, interpolate
        for table in self.parameters():
            nn.init.normal_(table, std=0.02)

    def forward(self, scale: int, n: int) -> Tensor:
        """(αL, D) at a local scale, (n, D) at the coarsest."""
        if scale < self.scales - 1:
            return self.local[scale]
        rows = self.globe.shape[0]
        if is_symbolic(n) and not self.interpolate:  # slices beyond the table are padding, see `composite_slice`
            return self.globe[torch.arange(n, device=self.globe.device).clamp(max=rows - 1)]
        n = settled(n, "interpolate", "how far positions are stretched", "leave interpolate out")
        if n <= rows:
            return self.globe[:n]
        if not self.interpolate:
            raise ValueError(
                f"{n} slices are beyond the {rows} of the global positions; interpolate=True stretches them"
            )
        return F.interpolate(self.globe.T[None], size=n, mode="linear", align_corners=True)[0].T
