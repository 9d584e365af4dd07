"""Torch's CPU flash attention, which returns the logsumexp, and its FLOPs, which torch's counter does not know.

A forward multiplies every (query, key) pair twice (scores, sums), a backward five times; one multiply-add = 2.
"""

from __future__ import annotations

import math

import torch
from torch.utils.flop_counter import register_flop_formula

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@register_flop_formula(flash)
def _flops(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    return 4 * math.prod(q_shape) * k_shape[2]


@register_flop_formula(flash_backward)
def _backward_flops(grad, q_shape, k_shape, *args, out_shape=None, **kwargs) -> int:
    return 10 * math.prod(q_shape) * k_shape[2]
