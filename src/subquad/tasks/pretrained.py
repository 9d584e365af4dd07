"""Fine-tuning: a model begins with the encoder of another one, trained before on other data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

# keys that must agree, and how recipes call them
SAME = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "feedforward",
    "type_vocab_size": "number of segments",
    "positions": "positions",
    "norm": "norm",
}
PREFIX, PLACES = "encoder.", "embeddings.places.weight"


def model_folder(path: Path) -> Path:
    """Of a run (`OUT`) or its model (`OUT/model`), the latter."""
    folder = path / "model" if (path / "model" / "config.json").exists() else path
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).exists():
            raise FileNotFoundError(f"init={path}: {folder / name} not found; give the model folder of a finished run")
    return folder


def copy_encoder(model: Any, path: Path) -> None:
    """Give `model` the encoder weights of a saved model; its head stays as it is. A model that does not fit is refused.

    Of learned positions the first ones are taken if the saved model has more. The attention may be another one if it
    has the same parameters.
    """
    folder = model_folder(path)
    before = json.loads((folder / "config.json").read_text())
    for key, word in SAME.items():
        if before.get(key) != getattr(model.config, key):
            raise ValueError(f"init={path}: its {word} is {before.get(key)}, here it is {getattr(model.config, key)}")
    try:
        weights = load_file(folder / "model.safetensors")
    except SafetensorError as error:
        raise ValueError(f"init={path}: {folder / 'model.safetensors'} cannot be read: {error}") from None
    encoder = {key.removeprefix(PREFIX): value for key, value in weights.items() if key.startswith(PREFIX)}
    if PLACES in encoder:
        length = model.config.max_position_embeddings
        if len(encoder[PLACES]) < length:
            raise ValueError(f"init={path}: it knows {len(encoder[PLACES])} positions, length={length} needs more")
        encoder[PLACES] = encoder[PLACES][:length]
    try:
        model.encoder.load_state_dict(encoder)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"init={path}: its attention {before['attention']!r} does not fit here: {reason}") from None
