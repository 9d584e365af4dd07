"""A whole model as a level of `bench`: embedding, 6 layers, loss, backward pass and the update of AdamW.

The model is a language model on bytes, causal or masked, as wide as all heads together, with a feed-forward layer four
times as wide in every block: what a user waits for, of which attention is a part. A small vocabulary keeps the logits
small beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.bench_steps import LEVELS, Level, Setting, Step
from subquad.models import SubquadConfig, SubquadForCausalLM, SubquadForMaskedLM

LEVEL = "model"
LAYERS = 6
BYTES = 256


class ModelStep(Step):
    """Forward, loss, backward and update on one batch of token ids (B, n)."""

    optimizer: torch.optim.Optimizer

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        mask = {} if self.key_mask is None else {"attention_mask": self.key_mask.long()}
        self.module(input_ids=self.inputs[0], labels=self.inputs[0], **mask).loss.backward()
        self.optimizer.step()


def config(spec: str, n: int, setting: Setting) -> SubquadConfig:
    width = setting.heads * setting.head_dim
    return SubquadConfig(
        vocab_size=BYTES,
        attention=spec,
        num_hidden_layers=LAYERS,
        num_attention_heads=setting.heads,
        hidden_size=width,
        intermediate_size=4 * width,
        max_position_embeddings=n,
        attention_dropout=setting.dropout,
    )


def _inputs(n: int, setting: Setting) -> tuple[list[Tensor], None]:
    ids = torch.randint(BYTES, (setting.batch, n), generator=torch.Generator().manual_seed(0))
    return [ids.to(setting.device)], None


def _step(spec: str, n: int, setting: Setting, data: tuple[list[Tensor], Tensor | None]) -> Step:
    head = SubquadForCausalLM if setting.causal else SubquadForMaskedLM
    model = head(config(spec, n, setting)).to(**setting.place).train()
    step = ModelStep(spec, LEVEL, model, *data)
    step.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)  # the model stays what it is
    return step


LEVELS[LEVEL] = Level(_inputs, _step)
