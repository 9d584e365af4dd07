"""Models on `transformers.PreTrainedModel`: one backbone, any attention, a head per kind of task.

from subquad.models import SubquadConfig, SubquadForCausalLM
model = SubquadForCausalLM(SubquadConfig(vocab_size=256, attention="combiner-fixed"))

Importing this package registers them with transformers' Auto classes (model_type "subquad").
"""

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from subquad.models import trees as trees  # caches are trees of tensors from now on
from subquad.models.cache import SubquadCache, SubquadEncoderDecoderCache
from subquad.models.config import SubquadConfig
from subquad.models.encoder import SubquadModel
from subquad.models.heads import (
    SubquadForCausalLM,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
)
from subquad.models.pairs import SubquadForPairClassification
from subquad.models.seq2seq import SubquadForConditionalGeneration

__all__ = [
    "HEADS",
    "SubquadCache",
    "SubquadConfig",
    "SubquadEncoderDecoderCache",
    "SubquadForCausalLM",
    "SubquadForConditionalGeneration",
    "SubquadForMaskedLM",
    "SubquadForPairClassification",
    "SubquadForSequenceClassification",
    "SubquadForTokenClassification",
    "SubquadModel",
]

# the name of a head as tasks say it
HEADS: dict[str, Any] = {
    "causal-lm": SubquadForCausalLM,
    "masked-lm": SubquadForMaskedLM,
    "sequence": SubquadForSequenceClassification,
    "token": SubquadForTokenClassification,
    "pair": SubquadForPairClassification,  # transformers has no Auto class for pairs
    "seq2seq": SubquadForConditionalGeneration,
}

AutoConfig.register("subquad", SubquadConfig)
AutoModel.register(SubquadConfig, SubquadModel)
for _head, _auto in {
    "causal-lm": AutoModelForCausalLM,
    "masked-lm": AutoModelForMaskedLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
}.items():
    _auto.register(SubquadConfig, HEADS[_head])
