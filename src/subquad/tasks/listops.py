"""ListOps (Nangia & Bowman 2018): nested lists of digits, and the digit that they come to.

    [MAX 2 9 [MIN 4 7 ] 0 ]  →  9          operators MIN, MAX, MED (median, rounded down) and SM (sum modulo 10)

Generated as the Long Range Arena does: a place is an operator with probability 1/4 while the depth allows it, else a
digit; an operator has 2 to `max_args` arguments; an expression counts if its length (operators, digits and closing
brackets) lies strictly between `min_length` and `max_length`. LRA: depth 10, 10 arguments, 500 to 2000 tokens, 96,000
expressions to train on, 2,000 to validate, 2,000 to test. With `source=file` the official files are read: LRA's
basic_{train,val,test}.tsv (header Source, Target) or the label<TAB>expression files of the original data set.

`paper` is the LRA setting of Cho et al. 2022 (table 7). `small` has expressions of 10 to 100 tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from subquad.core.options import option
from subquad.data.datasets import Examples, generated_splits
from subquad.data.files import Source, read_lines
from subquad.tasks.arena import CST, ArenaTask
from subquad.tasks.base import Example, Splits
from subquad.tasks.recipe import Recipe

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
TOKENS = ("<pad>", *OPERATORS, "]", *map(str, range(10)))
IDS = {token: number for number, token in enumerate(TOKENS)}
END, ZERO = IDS["]"], IDS["0"]
OPERATOR_SHARE = 0.25

SOURCE = Source(
    "listops",
    "ListOps: basic_train.tsv, basic_val.tsv, basic_test.tsv (or train_d20s.tsv, test_d20s.tsv of the original)",
    "the Long Range Arena release (google-research/long-range-arena), or nyu-mll/spinn",
)


@dataclass(frozen=True, kw_only=True)
class ListOpsRecipe(Recipe):
    source: Literal["generated", "file"] = option("generated", "where expressions come from")
    max_depth: int = option(10, "levels of operators", ge=1)
    max_args: int = option(10, "most arguments of an operator", ge=2)
    min_length: int = option(500, "expressions are longer than this", ge=0)
    max_length: int = option(2000, "expressions are shorter than this", ge=4)

    def check_task(self) -> None:
        low, high = self.min_length, self.max_length
        if self.source == "generated" and (high - 1 > self.length or low + 2 > high):
            raise ValueError(
                f"min_length={low} and max_length={high} ask for expressions of {low + 1} to {high - 1} tokens, and "
                f"length={self.length} is the longest that fits"
            )


class ListOps(ArenaTask):
    title = "evaluate nested MIN, MAX, MED and SM of digits (generated, or official files)"
    paper = "Long Range Arena; Cho et al. 2022, table 7"
    head = "sequence"
    recipes = {
        "small": ListOpsRecipe(
            length=100, max_depth=4, max_args=5, min_length=10, max_length=100, width=64, layers=2, heads=4,
            feedforward=128, steps=1500, batch=64, rate=1e-3, warmup=100, evaluate=250,
            train_size=60_000, eval_size=1000,
        ),
        "paper": ListOpsRecipe(
            length=2048, width=64, layers=2, heads=2, feedforward=128, dropout=0.1, attention_dropout=0.1, steps=5000,
            batch=128, rate=5e-4, warmup=1000, schedule="linear", decay=0.0, evaluate=250, train_size=96_000,
            eval_size=2000, classifier="mlp",
        ),
        "cst": ListOpsRecipe(
            length=2048, **CST, steps=5000, batch=128, warmup=1000, evaluate=250, train_size=96_000, eval_size=2000
        ),
    }  # fmt: skip

    def load(self) -> Splits:
        r = self.recipe
        if r.source == "file":
            return self._read()
        sizes = (r.train_size or 96_000, r.eval_size or 2000, r.eval_size or 2000)
        return generated_splits(self.make, sizes, self.seed)

    def make(self, rng: np.random.Generator) -> Example:
        r, draw = self.recipe, random.Random(int(rng.integers(2**63)))  # scalar draws: far faster than numpy's
        while True:
            ids: list[int] = []
            value = grow(draw, ids, 1, r.max_depth, r.max_args, r.max_length)
            if r.min_length < len(ids) < r.max_length:
                return {"input_ids": torch.tensor(ids), "labels": torch.tensor(value)}

    def _read(self) -> Splits:
        names = [("basic_train.tsv", "train_d20s.tsv"), ("basic_val.tsv",), ("basic_test.tsv", "test_d20s.tsv")]
        parts = []
        for choices in names:
            try:
                parts.append(read(SOURCE.find(self.data, *choices), self.recipe.length))
            except FileNotFoundError:
                if choices[0] != "basic_val.tsv":
                    raise
                parts.append([])  # the original has no validation part: it comes out of the training part
        train, valid, test = parts
        if not valid:
            cut = max(len(train) // 20, 1)
            train, valid = train[cut:], train[:cut]
        limits = (self.recipe.train_size, self.recipe.eval_size, self.recipe.eval_size)
        return Splits(*(
            Examples([ids for ids, _ in part[:limit]], [value for _, value in part[:limit]])
            for part, limit in zip((train, valid, test), limits, strict=True)
        ))  # fmt: skip

    def vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": len(TOKENS), "num_labels": 10, "pad_token_id": 0}

    def read(self, text: str) -> Example:
        ids = tokens(text, "the expression")
        evaluate(ids, "the expression")  # a malformed one is an error, not an answer
        return {"input_ids": torch.tensor(ids)}


def grow(draw: random.Random, ids: list[int], depth: int, deepest: int, most: int, limit: int) -> int:
    """Append a random expression to `ids` (given up when it is too long already); returns its value."""
    if len(ids) >= limit or depth >= deepest or draw.random() > OPERATOR_SHARE:
        value = draw.randrange(10)
        ids.append(ZERO + value)
        return value
    operator = draw.randrange(len(OPERATORS))
    ids.append(1 + operator)
    arguments = [grow(draw, ids, depth + 1, deepest, most, limit) for _ in range(draw.randint(2, most))]
    ids.append(END)
    return apply(operator, arguments)


def apply(operator: int, arguments: list[int]) -> int:
    """MIN, MAX, MED, SM of a list of digits."""
    if operator == 2:
        return int(np.median(arguments))
    return (min(arguments), max(arguments), 0, sum(arguments) % 10)[operator]


def tokens(text: str, where: str) -> list[int]:
    """The tokens of an expression; parentheses, which only mark the tree, are dropped."""
    words = text.replace("(", " ").replace(")", " ").split()
    for word in words:
        if word not in IDS or word == "<pad>":
            raise ValueError(f"{where}: {word!r} is not a token of ListOps ({' '.join(TOKENS[1:])}){advice(word)}")
    if not words:
        raise ValueError(f"{where}: no expression")
    return [IDS[word] for word in words]


def advice(word: str) -> str:
    """What is missing in a word that is several tokens, such as `2]`."""
    apart = re.findall(r"\[[A-Z]+|.", word)
    return "; separate tokens with spaces" if len(apart) > 1 and set(apart) <= set(TOKENS) else ""


def evaluate(ids: list[int], where: str) -> int:
    """The value of an expression, by its brackets."""
    stack: list[tuple[int, list[int]]] = [(-1, [])]
    for token in ids:
        if token >= ZERO:
            stack[-1][1].append(token - ZERO)
        elif token == END:
            operator, arguments = stack.pop()
            if operator < 0 or not arguments:
                raise ValueError(f"{where}: a bracket closes {'nothing' if operator < 0 else 'an empty list'}")
            stack[-1][1].append(apply(operator, arguments))
        else:
            stack.append((token - 1, []))
    if len(stack) != 1 or len(stack[0][1]) != 1:
        raise ValueError(f"{where}: {'a bracket is open' if len(stack) > 1 else 'it is not one expression'}")
    return stack[0][1][0]


def read(path: Path, longest: int) -> list[tuple[np.ndarray, int]]:
    """(ids, value) of every row of an official file; a label that is not the value is an error."""
    rows = list(_rows(path, longest))
    if not rows:
        raise ValueError(f"{path} holds no expressions")
    return rows


def _rows(path: Path, longest: int) -> Iterator[tuple[np.ndarray, int]]:
    for number, line in read_lines(path):
        where, columns = f"{path}, line {number}", line.split("\t")
        if number == 1 and columns == ["Source", "Target"]:
            continue
        if len(columns) != 2:
            raise ValueError(f"{where}: {len(columns)} columns, expected 2 (label and expression)")
        label, text = columns if columns[0].strip().isdigit() and len(columns[0].strip()) == 1 else reversed(columns)
        if not label.strip().isdigit() or not 0 <= int(label) <= 9:
            raise ValueError(f"{where}: label {label!r}, expected a digit")
        ids = tokens(text, where)
        if int(label) != evaluate(ids, where):
            raise ValueError(f"{where}: label {label}, but the expression comes to {evaluate(ids, where)}")
        yield np.array(ids[:longest], dtype=np.uint8), int(label)
