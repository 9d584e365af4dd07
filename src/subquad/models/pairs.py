"""Two texts, one answer: a dual encoder, as the Long Range Arena has it for Retrieval (Tay et al. 2021).

    u, v = pooled states of the two texts, from one backbone, each coordinate normalised over all texts
    logits = MLP([u, v, u · v, u - v])    two hidden layers there, one in Xiong et al. 2021 (`classifier="mlp"`)

The texts meet only after pooling. Both go through the backbone as one batch, so that what a mechanism counts in a
call (the density of SBM layers, for instance) covers both. The normalisation (BatchNorm without parameters) is ours:
pooled vectors of long texts are almost the same, whatever the text, and u · v is blind until that common part is gone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.distributed.exchange import Linear
from subquad.models.blocks import Glorot
from subquad.models.checks import check_ids, check_mask
from subquad.models.config import SubquadConfig
from subquad.models.heads import Head, pool
from subquad.models.outputs import Scores, returns_output


class PairClassifier(Glorot):
    """(B, 4D) → (B, labels), with ReLU: the Arena's two hidden layers, or one with `classifier="mlp"`."""

    def __init__(self, config: SubquadConfig) -> None:
        hidden = (config.intermediate_size, max(config.intermediate_size // 2, 1))
        widths = (4 * config.hidden_size, *hidden[: 1 if config.classifier == "mlp" else 2])
        layers: list[nn.Module] = [nn.Dropout(config.dropout)]
        for before, after in zip(widths, (*widths[1:], config.num_labels), strict=True):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers[:-1])


class SubquadForPairClassification(Head):
    """One answer per pair of sequences: ids (B, n) and pair ids (B, m) → logits (B, labels)."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.classifier = PairClassifier(config)
        self.norm = GlobalBatchNorm(config.hidden_size, affine=False)  # two texts a pair: never a batch of one
        self.post_init()

    @returns_output
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pair_ids: Tensor | None = None,
        pair_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_records: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Scores:
        """input_ids (B, n), pair_ids (B, m), masks of the same shapes (1 = real); logits (B, labels)."""
        ids, mask = together(input_ids, attention_mask, pair_ids, pair_mask)  # (2B, max(n, m))
        backbone = self.encoder(
            ids,
            mask,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            output_records=output_records,
            return_dict=True,
        )
        pooled = pool(backbone.last_hidden_state, mask, self.config.pooling)  # (2B, D)
        u, v = self.norm(pooled).chunk(2)  # (B, D) each
        logits = self.classifier(torch.cat([u, v, u * v, u - v], -1))  # (B, labels)
        return self.scored(backbone, logits, labels, num_items_in_batch)


class GlobalBatchNorm(nn.BatchNorm1d):
    """BatchNorm over the batches of all processes, so that a batch gives the same loss however it is divided among
    them. (torch's SyncBatchNorm does this on GPUs only.) The definition is BatchNorm1d on the whole batch.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (B, D) of this process; every process must call it."""
        if not (self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # (B, D)
        count = _total(wide.new_full((), float(x.shape[0])))  # ()
        mean = _total(wide.sum(0)) / count  # (D,)
        variance = _total((wide - mean).square().sum(0)) / count  # (D,): two passes, nothing cancels
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return ((wide - mean) * (variance + self.eps).rsqrt()).to(x.dtype)


def _total(x: Tensor) -> Tensor:
    """The sum over all processes. Each of them uses it, so its gradient is the sum of theirs."""
    return Linear.apply(_summed, _summed, x)


def _summed(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def together(
    input_ids: Tensor | None, attention_mask: Tensor | None, pair_ids: Tensor | None, pair_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Both texts as one batch (2B, max(n, m)), the first ones first; a mask only where something is padded."""
    if input_ids is None or pair_ids is None:
        raise ValueError(f"{'input_ids' if input_ids is None else 'pair_ids'} is missing: a pair is two texts")
    check_ids("input_ids", input_ids)
    check_ids("pair_ids", pair_ids)
    check_mask("attention_mask", attention_mask, input_ids)
    check_mask("pair_mask", pair_mask, pair_ids)
    if input_ids.shape[0] != pair_ids.shape[0]:
        raise ValueError(f"{input_ids.shape[0]} input_ids and {pair_ids.shape[0]} pair_ids: every text needs its pair")
    longest = max(input_ids.shape[1], pair_ids.shape[1])
    texts, masks = (input_ids, pair_ids), (attention_mask, pair_mask)
    ids = torch.cat([F.pad(x, (0, longest - x.shape[1])) for x in texts])
    if attention_mask is None and pair_mask is None and input_ids.shape == pair_ids.shape:
        return ids, None
    real = [torch.ones_like(x) if mask is None else mask for x, mask in zip(texts, masks, strict=True)]
    return ids, torch.cat([F.pad(x.long(), (0, longest - x.shape[1])) for x in real])
