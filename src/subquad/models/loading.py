"""Names that older checkpoints used, and weights that a checkpoint lacks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers import initialization
from transformers.modeling_utils import load_state_dict

from subquad.attention.base import Attention

FUSED = re.compile(r"(^|\.)(attention|cross)\.in_proj_(weight|bias)$")  # q, k and v in one matrix
OLD_BIAS, BIAS = "bias", "lm_head.bias"  # of the masked-language-model head


def separate_projections(state: dict[str, Tensor], prefix: str) -> None:
    """Split in_proj_weight and in_proj_bias of the layer at `prefix` into those of q_proj, k_proj and v_proj."""
    for kind in ("weight", "bias"):
        fused = state.pop(f"{prefix}in_proj_{kind}", None)
        if fused is not None:
            for name, part in zip("qkv", fused.chunk(3), strict=True):
                state[f"{prefix}{name}_proj.{kind}"] = part.contiguous()


def of_today(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under the names of today."""
    state = dict(state)
    for key in [key for key in state if FUSED.search(key)]:
        separate_projections(state, re.sub(r"in_proj_(weight|bias)$", "", key))
    if OLD_BIAS in state:
        state[BIAS] = state.pop(OLD_BIAS)
    return state


def read_old(files: Sequence[str] | None) -> dict[str, Tensor] | None:
    """The whole state if one of these checkpoint files uses old names; None where transformers can read them itself."""
    if not files or not any(key == OLD_BIAS or FUSED.search(key) for file in files for key in _keys(file)):
        return None
    return dict(chain.from_iterable(load_state_dict(file).items() for file in files))


def _keys(file: str) -> list[str]:
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    return list(load_state_dict(file))


def count_shared(model: nn.Module, result: Any) -> None:
    """After `load_state_dict`: a tensor with several names is in a checkpoint under one of them; no name is missing."""
    named = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(tensor) for name, tensor in named.items() if name not in result.missing_keys}
    result.missing_keys[:] = [name for name in result.missing_keys if id(named.get(name)) not in loaded]


def renew(mechanism: Attention) -> None:
    """Give a mechanism the parameters and buffers of a new one, except those that a checkpoint has filled."""
    if next(chain(mechanism.parameters(), mechanism.buffers()), None) is None:
        return
    new: Any = type(mechanism)(mechanism.options)
    for mine, other in zip(_tensors(mechanism), _tensors(new), strict=True):
        initialization.copy_(mine, other)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
