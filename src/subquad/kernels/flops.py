"""Floating-point operations of our kernels, for `torch.utils.flop_counter.FlopCounterMode`.

A forward multiplies every (query, key) pair twice (scores, sums), a backward five times; one multiply-add = 2.
"""

from __future__ import annotations

import math

import torch
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels import merge  # noqa: F401  (its import defines the ops)
from subquad.kernels.blocks import unplan


def _pairs(plan) -> int:
    return sum(p.blocks * p.q_len * p.k_len for p in unplan(plan))


@register_flop_formula(torch.ops.subquad.merge)
def _merge(q_shape, keys, values, valid, plan, scale, *args, out_shape=None, **kwargs) -> int:
    return 4 * math.prod(q_shape[:2]) * q_shape[3] * _pairs(plan)


@register_flop_formula(torch.ops.subquad.merge_backward)
def _merge_backward(grad, q_shape, keys, values, out, lse, valid, plan, scale, *args, out_shape=None, **kwargs) -> int:
    return 10 * math.prod(q_shape[:2]) * q_shape[3] * _pairs(plan)


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _flash(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    return 4 * math.prod(q_shape) * k_shape[2]


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _flash_backward(grad, q_shape, k_shape, *args, out_shape=None, **kwargs) -> int:
    return 10 * math.prod(q_shape) * k_shape[2]
