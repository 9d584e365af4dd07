"""Pretrained Hugging Face models with another attention inside.

    import subquad.hf

    model = subquad.hf.convert(model, "combiner-window", span=32, window=256, sinks=4)
    model.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)        # restores the attention, once subquad.hf is imported

Importing this package registers the attention "subquad" with transformers' AttentionInterface and
AttentionMaskInterface, and lets a model whose config holds the record of a conversion make its mechanisms again.
"""

from subquad.hf.conversion import convert, converted_layers, restore_on_load, revert
from subquad.hf.interface import register_interface

register_interface()
restore_on_load()

__all__ = ["convert", "converted_layers", "revert"]
