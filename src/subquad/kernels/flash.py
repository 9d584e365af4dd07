"""Floating-point operations of torch's CPU flash attention, which torch's counter does not know.

A forward multiplies every (query, key) pair twice (scores, sums), a backward five times; one multiply-add = 2.
"""

from __future__ import annotations

import math

import torch
from torch.utils.flop_counter import register_flop_formula


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _flash(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    return 4 * math.prod(q_shape) * k_shape[2]


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _flash_backward(grad, q_shape, k_shape, *args, out_shape=None, **kwargs) -> int:
    return 10 * math.prod(q_shape) * k_shape[2]
