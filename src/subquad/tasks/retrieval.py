"""Does one paper cite the other? Two texts, byte by byte: the Retrieval task of the Long Range Arena (Tay et al. 2021).

    label<TAB>id1<TAB>id2<TAB>text1<TAB>text2          label 1.0 (linked) or 0.0, no header

Each text is its first `length` bytes, byte b as id b + 1 (0 is padding); a dual encoder pools each into one vector and
compares the two. Answering always the same class is right in 50 %. Sources: `aan`, the Arena's pairs from the ACL
Anthology Network, new_aan_pairs.{train,eval,test}.tsv; `acl`, other pairs in the same format, named
acl_pairs.{train,eval,test}.tsv, loose or in acl_pairs.tar. The Arena's texts are written as Python literals (b'…',
escapes and all); the Arena feeds a model these characters as they stand, and so do we.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.core.options import option
from subquad.data.files import Source, members, opened
from subquad.tasks.arena import CST, ByteTask
from subquad.tasks.base import Example, Splits, collate
from subquad.tasks.recipe import Recipe

SOURCES = {
    "aan": Source(
        "retrieval",
        "new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv (folder tsv_data)",
        "the Long Range Arena release, https://github.com/google-research/long-range-arena",
    ),
    "acl": Source(
        "acl-retrieval",
        "acl_pairs.train.tsv, acl_pairs.eval.tsv and acl_pairs.test.tsv, or acl_pairs.tar with them: pairs of papers "
        "in the format of the Long Range Arena,",
        "any citation corpus of your own, such as https://github.com/WING-NUS/scisumm-corpus",
    ),
}
STEMS = {"aan": "new_aan_pairs", "acl": "acl_pairs"}
PARTS = ("train", "eval", "test")
LABELS = {b"0.0": 0, b"1.0": 1, b"0": 0, b"1": 1}


@dataclass(frozen=True, kw_only=True)
class RetrievalRecipe(Recipe):
    source: Literal["aan", "acl"] = option("aan", "the Arena's pairs, or pairs of one's own in its format")


class Retrieval(ByteTask):
    """Recipe `paper`: Table 7 of the SBM paper (column RETRIEVAL), but for `length`: the Arena's 4000 bytes, not 4096.

    The paper builds on the Nyströmformer's implementation of the Arena; what its table leaves out is from there:
    800 warm-up steps, then linear decay, no weight decay, an evaluation every 300 steps.
    """

    title = "does one paper cite the other, byte by byte (Long Range Arena: Retrieval)"
    paper = "Tay et al. 2021; SBM, Table 7; Composite Slice, A.6.1; Combiner, Table 5"
    head = "pair"
    needs_data = True
    sources = {"aan": SOURCES["aan"], "acl": SOURCES["acl"]}
    classes = ("not linked", "linked")
    recipes = {
        "small": RetrievalRecipe(
            source="acl", length=2000, width=32, layers=1, heads=2, feedforward=64, initial=0.125, steps=600, batch=16,
            rate=3e-3, warmup=40, evaluate=100, eval_size=547,
        ),
        "paper": RetrievalRecipe(
            length=4000, width=64, layers=2, heads=2, feedforward=128, dropout=0.1, attention_dropout=0.1,
            steps=30000, batch=32, rate=1e-4, warmup=800, schedule="linear", decay=0.0, evaluate=300,
            classifier="mlp",
        ),
        "cst": RetrievalRecipe(length=4000, **{**CST, "rate": 1e-4}, steps=30000, batch=32, warmup=800, evaluate=300),
    }  # fmt: skip

    def load(self) -> Splits:
        limits = (self.recipe.train_size, self.recipe.eval_size, self.recipe.eval_size)
        keys = ("train_size", "eval_size", "eval_size")
        parts = []
        for (name, pairs), limit, key in zip(self._parts(), limits, keys, strict=True):
            if (limit or 0) > len(pairs):
                raise ValueError(f"{key} must be at most {len(pairs)}, the pairs of {name}, not {limit}")
            # drawn, because files are often sorted; always in the same way, so that a test set stays what it is
            order = np.random.default_rng(0).permutation(len(pairs))[:limit]
            parts.append(Pairs([pairs[index] for index in order]))
        return Splits(*parts)

    def _parts(self) -> list[tuple[str, list[tuple[np.ndarray, np.ndarray, int]]]]:
        """(file, pairs) of the three parts, from loose files or one archive."""
        source, stem = SOURCES[self.recipe.source], STEMS[self.recipe.source]
        found = source.find(self.data, f"{stem}.train.tsv", f"{stem}.tar")
        if ".tar" not in found.name:
            paths = [source.find(self.data, f"{stem}.{part}.tsv") for part in PARTS]
            return [(str(path), self._read(path)) for path in paths]
        wanted = re.compile(rf"(?:^|/){stem}\.({'|'.join(PARTS)})\.tsv$")
        inside = {}
        for name, content in members(found, wanted.search):
            where = f"{found}: {name}"
            inside[name.split(".")[-2]] = (where, self.rows(where, content.split(b"\n")))
        for part in PARTS:
            if part not in inside:
                raise ValueError(f"{found} holds no file named {stem}.{part}.tsv")
        return [inside[part] for part in PARTS]

    def _read(self, path: Any) -> list[tuple[np.ndarray, np.ndarray, int]]:
        with opened(path) as file:
            return self.rows(str(path), file)

    def rows(self, name: str, lines: Iterable[bytes]) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """(text 1, text 2, label) of every line; what is wrong with one is said with its number."""
        found = []
        for number, line in enumerate(lines, 1):
            line = line.rstrip(b"\r\n")
            if not line:
                continue  # the end of the file
            where, columns = f"{name}, line {number}", line.split(b"\t")
            if len(columns) != 5:
                raise ValueError(f"{where}: {len(columns)} columns, expected 5: label, two ids, two texts")
            label, _, _, first, second = columns
            if label not in LABELS:
                raise ValueError(f"{where}: label {label.decode(errors='replace')!r}, expected 1.0 or 0.0")
            if not first or not second:
                raise ValueError(f"{where}: text {1 if not first else 2} is empty")
            found.append((self.ids(first), self.ids(second), LABELS[label]))
        if not found:
            raise ValueError(f"{name} holds no pairs")
        return found

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Each side padded to its own longest text."""
        examples = [self.with_cls(example) for example in examples]
        firsts = [{key: x for key, x in example.items() if key != "pair_ids"} for example in examples]
        batch = collate(firsts, 0)
        seconds = collate([{"input_ids": example["pair_ids"]} for example in examples], 0)
        batch["pair_ids"] = seconds["input_ids"]
        if "attention_mask" in seconds:
            batch["pair_mask"] = seconds["attention_mask"]
        return batch

    def read(self, text: str) -> Example:
        """Two texts with a tab between them; as in training, what follows the first `length` bytes is not read."""
        texts = text.split("\t")
        if len(texts) != 2 or not all(texts):
            raise ValueError(f"{self.name}: a line is two texts with one tab between them, text1<TAB>text2")
        first, second = (torch.from_numpy(self.ids(one.encode()).astype(np.int64)) for one in texts)
        return {"input_ids": first, "pair_ids": second}


class Pairs(Dataset):
    """Pairs of texts in memory, with their labels."""

    def __init__(self, pairs: Sequence[tuple[np.ndarray, np.ndarray, int]]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Example:
        first, second, label = self.pairs[index]
        return {
            "input_ids": torch.from_numpy(first.astype(np.int64)),
            "pair_ids": torch.from_numpy(second.astype(np.int64)),
            "labels": torch.tensor(label),
        }
