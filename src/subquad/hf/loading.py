"""A model and its tokenizer from a folder of transformers' or from a .gguf file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from subquad.core.files import check_pretrained


def load(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The language model and the tokenizer. Nothing is fetched from anywhere.

    The weights of a .gguf file are unpacked to `dtype`; the mark of the packing is dropped, because transformers would
    refuse to save the model otherwise.
    """
    check_pretrained(path)
    if path.suffix == ".gguf":
        return _load_gguf(path, dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def _load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError('a .gguf file is read with the library gguf: pip install "subquad[gguf]"')
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **where)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval(), tokenizer


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """A folder that `load` and from_pretrained read."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
