"""GLUE (Wang et al. 2018): nine questions about a sentence or a pair of sentences, read from the official TSV files.

An example is [CLS] a [SEP] or [CLS] a [SEP] b [SEP] in subwords, shortened to the length by taking tokens off the end
of the longer sentence; the model answers from the mean of its tokens. The official test files have no labels, so dev
is the test set here, and a drawn tenth of train (2000 rows at most) chooses the checkpoint. The training set of SST-2
is made of phrases, so its validation rows share words with training rows, and validation flatters there.

With `init` a model begins with the encoder (and tokenizer) that the task `mlm` has trained; without, it is trained
from scratch, with a tokenizer made from the task's own training sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.core.options import option
from subquad.data import subwords
from subquad.data.files import Source, members
from subquad.data.subwords import cached_tokenizer, encode_all, framed
from subquad.data.tables import Columns, Row, read_rows
from subquad.tasks import scores
from subquad.tasks.base import Example, Splits
from subquad.tasks.pretrained import copy_encoder, model_folder
from subquad.tasks.recipe import Recipe
from subquad.tasks.tokenized import TokenizedTask

BINARY, ENTAILMENT = ("0", "1"), ("entailment", "not_entailment")
GLUE = "the GLUE page, gluebenchmark.com"
VALID = 2000  # at most so many rows of the training file choose the checkpoint


TABLE = {
    "cola": Columns("CoLA", "sentence", None, "label", BINARY, 8551, ("source", "label", "mark", "sentence")),
    "sst2": Columns("SST-2", "sentence", None, "label", BINARY, 67_349),
    "mrpc": Columns("MRPC", "#1 String", "#2 String", "Quality", BINARY, 3668),
    "stsb": Columns("STS-B", "sentence1", "sentence2", "score", (), 5749),
    "qqp": Columns("QQP", "question1", "question2", "is_duplicate", BINARY, 363_846, torn=True),
    "mnli": Columns(
        "MNLI", "sentence1", "sentence2", "gold_label", ("entailment", "neutral", "contradiction"), 392_702,
        dev="dev_matched.tsv",
    ),
    "qnli": Columns("QNLI", "question", "sentence", "label", ENTAILMENT, 104_743),
    "rte": Columns("RTE", "sentence1", "sentence2", "label", ENTAILMENT, 2490),
    "wnli": Columns("WNLI", "sentence1", "sentence2", "label", BINARY, 635),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GlueRecipe(Recipe):
    init: str | None = option(None, "a model of the task mlm to begin with; None = from scratch")
    subwords: int = option(8000, "tokens in the vocabulary, without init", ge=256 + len(subwords.SPECIALS))


def recipes(rows: int) -> dict[str, GlueRecipe]:
    """`paper`: SBM-Transformer, table 7, column GLUE: 5 epochs, after the `paper` recipe of mlm. `base`: BERT-base at
    length 128 as in Sparse Transformers G.4 and Composite Slice A.8.1 (mean pooling, its table 5), after the `base`
    recipe of mlm: 3 epochs, batch 32, and of the rates of Devlin et al. 2019 the middle one, 3e-5. Warm-up, schedule
    and decay are BERT's where a paper is silent. `small` fits the `small` recipe of mlm.
    """
    epoch = -(-rows // 32)
    return {
        "small": GlueRecipe(
            length=128, width=128, layers=2, heads=4, feedforward=512, positions="rotary-or-published", dropout=0.1,
            steps=min(2000, 10 * epoch), batch=32, rate=1e-3, warmup=50, evaluate=min(250, epoch), subwords=8000,
        ),
        "paper": GlueRecipe(
            length=512, width=512, layers=4, heads=8, feedforward=2048, norm="post", dropout=0.1, attention_dropout=0.1,
            steps=5 * epoch, batch=32, rate=3e-5, warmup=epoch // 2, schedule="linear", evaluate=min(1000, epoch),
            subwords=50265,
        ),
        "base": GlueRecipe(
            length=128, width=768, layers=12, heads=12, feedforward=3072, norm="post", dropout=0.1,
            attention_dropout=0.1, steps=3 * epoch, batch=32, rate=3e-5, warmup=3 * epoch // 10, schedule="linear",
            evaluate=min(1000, epoch), subwords=30522,
        ),
    }  # fmt: skip


class Glue(TokenizedTask):
    """What the nine have in common; each adds its columns and its metric."""

    columns: ClassVar[Columns]
    paper = "SBM-Transformer, table 4; Sparse Transformers, figures 2 and 4; Composite Slice, table 5"
    needs_data = True
    sources = {
        "": Source("glue", "the zip of a task, such as CoLA.zip, or its files in a folder, such as CoLA/", GLUE),
    }  # fmt: skip

    def load(self) -> Splits:
        r = self.recipe
        if r.length < 5:
            raise ValueError(f"{self.name}: length must be ≥ 5 (two tokens and three specials), not {r.length}")
        train, dev = self.rows("train"), self.rows("dev")
        if not self.has_tokenizer:
            self.tokenizer = (
                subwords.load(model_folder(Path(r.init)))
                if r.init is not None
                else cached_tokenizer([text for row in train for text in row[:2] if text], r.subwords, lowercase=True)
            )
        order = np.random.default_rng(self.seed).permutation(len(train))
        held = min(-(-len(train) // 10), VALID)
        valid, train = [train[i] for i in order[:held]], [train[i] for i in order[held:]]
        parts = (train[: r.train_size], valid[: r.eval_size], dev[: r.eval_size])
        return Splits(*map(self._sentences, parts))

    def _sentences(self, rows: Sequence[Row]) -> Sentences:
        first, second = (encode_all(self.tokenizer, [row[k] for row in rows]) for k in (0, 1))
        whole = bool(self.columns.labels)
        labels = torch.tensor([row[2] for row in rows], dtype=torch.long if whole else torch.float)
        return Sentences(first, second, labels, self.recipe.length)

    def rows(self, part: str) -> list[Row]:
        """The rows of train or dev; every bad one is an error with its place."""
        c = self.columns
        source = Source("glue", f"{c.folder}.zip or its files in {c.folder}/", GLUE)
        path, file = source.find(self.data, f"{c.folder}.zip", c.folder), f"{part}.tsv" if part == "train" else c.dev
        found = [content for name, content in members(path, lambda name: name == f"{c.folder}/{file}")]
        if not found:
            raise ValueError(
                f"{path} holds no {c.folder}/{file}, and {self.name} cannot be trained without it; get {source.what} "
                f"from {source.origin}"
            )
        rows = list(read_rows(f"{path}: {file}", found[0], c))
        if not rows:
            raise ValueError(f"{path}: {file} has no rows")
        return rows

    def measure(self, statistics: np.ndarray) -> dict[str, float]:
        """Accuracy, and the F1 that table 4 of SBM-Transformer gives: of class 1, or the mean of three classes."""
        several = len(self.columns.labels) > 2
        return (scores.macro_f1_and_accuracy if several else scores.f1_and_accuracy)(statistics)

    def vocabulary(self) -> dict[str, Any]:
        size, labels = self.tokenizer.get_vocab_size(), len(self.columns.labels) or 1
        return {"vocab_size": size, "num_labels": labels, "type_vocab_size": 2, "pad_token_id": 0}

    def initialise(self, model: Any) -> None:
        if self.recipe.init is not None:
            copy_encoder(model, Path(self.recipe.init))

    def encode(self, text: str) -> Example:
        """A sentence, or two with a tab between."""
        sentences = text.split("\t")
        wanted = 1 if self.columns.second is None else 2
        if len(sentences) != wanted:
            raise ValueError(
                f"{self.name}: a line is {'a sentence' if wanted == 1 else 'two sentences with a tab between'}, "
                f"not {len(sentences)} parts with tabs between"
            )
        a, b = (*sentences, "")[:2]
        example = self._sentences([(a, b, 0)])[0]
        del example["labels"]
        return example

    def answer(self, logits: Tensor) -> str:
        labels = self.columns.labels
        return labels[int(logits.argmax(-1))] if labels else f"{float(logits):.3f}"


class Sentences(Dataset):
    """Sentences or pairs of them, in tokens, with labels (N,)."""

    def __init__(self, first: list[list[int]], second: list[list[int]], labels: Tensor, length: int) -> None:
        self.first, self.second, self.labels, self.length = first, second, labels, length

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> Example:
        a, b = self.first[index], self.second[index]
        return {**framed(*shortened(a, b, self.length - (3 if b else 2))), "labels": self.labels[index]}


def shortened(a: Sequence[int], b: Sequence[int], room: int) -> tuple[Sequence[int], Sequence[int]]:
    """Both to `room` tokens in all: the longer one loses its last token until they fit."""
    keep = min(len(a), max(room - len(b), (room + 1) // 2))
    return a[:keep], b[: max(room - keep, 0)]


# ---- the nine -------------------------------------------------------------------------------------------------


class Cola(Glue):
    title = "GLUE CoLA: is the sentence grammatical?"
    metric = "matthews"
    columns, recipes = TABLE["cola"], recipes(TABLE["cola"].rows)

    def measure(self, statistics: np.ndarray) -> dict[str, float]:
        return scores.matthews(statistics)


class Sst2(Glue):
    title = "GLUE SST-2: does the review praise or blame?"
    columns, recipes = TABLE["sst2"], recipes(TABLE["sst2"].rows)


class Mrpc(Glue):
    title = "GLUE MRPC: do two sentences say the same?"
    metric = "f1"
    columns, recipes = TABLE["mrpc"], recipes(TABLE["mrpc"].rows)


class Stsb(Glue):
    title = "GLUE STS-B: how alike are two sentences, from 0 to 5?"
    metric = "pearson"
    columns, recipes = TABLE["stsb"], recipes(TABLE["stsb"].rows)

    def measure(self, statistics: np.ndarray) -> dict[str, float]:
        return scores.correlations(statistics)


class Qqp(Mrpc):
    title = "GLUE QQP: do two questions ask the same?"
    columns, recipes = TABLE["qqp"], recipes(TABLE["qqp"].rows)


class Mnli(Glue):
    title = "GLUE MNLI, matched: does the second sentence follow, contradict, or neither?"
    columns, recipes = TABLE["mnli"], recipes(TABLE["mnli"].rows)


class Qnli(Glue):
    title = "GLUE QNLI: does the sentence answer the question?"
    columns, recipes = TABLE["qnli"], recipes(TABLE["qnli"].rows)


class Rte(Glue):
    title = "GLUE RTE: does the second sentence follow from the first?"
    columns, recipes = TABLE["rte"], recipes(TABLE["rte"].rows)


class Wnli(Glue):
    title = "GLUE WNLI: is the pronoun resolved rightly?"
    columns, recipes = TABLE["wnli"], recipes(TABLE["wnli"].rows)
