"""XNLI (Conneau et al. 2018): does the second sentence follow, contradict, or neither? In one of fifteen languages.

The paper trains on the translated MNLI of a language and reports accuracy on XNLI's dev set. `source=mnli` reads
`multinli.train.LANGUAGE.tsv` of XNLI-MT-1.0 (columns premise, hypo, label, where a contradiction is called
contradictory). `source=dev` makes do with the 2,490 rows of dev: nine tenths of them, drawn by the seed, train, and the
rest test; that is too little to learn much from, and enough to try the task. Dev is `dev-LANGUAGE.tsv`
(premise, hypothesis, label, no header), alone or in `xnli-dev.tar`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from subquad.core.options import option
from subquad.data.files import Source, members, read_bytes
from subquad.data.tables import Columns, Row, read_rows
from subquad.tasks.glue import Glue, GlueRecipe, recipes

LABELS = ("entailment", "neutral", "contradiction")
LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
DEV = Columns("xnli", "premise", "hypothesis", "label", LABELS, 2490, ("premise", "hypothesis", "label"))
TRAIN = Columns("xnli", "premise", "hypo", "label", (*LABELS[:2], "contradictory"), 392_702)
SOURCE = Source(
    "xnli",
    "dev-LANGUAGE.tsv (or xnli-dev.tar with them) and, for source=mnli, multinli.train.LANGUAGE.tsv of XNLI-MT-1.0",
    "the XNLI page, cims.nyu.edu/~sbowman/xnli",
)


@dataclass(frozen=True, kw_only=True)
class XnliRecipe(GlueRecipe):
    source: Literal["mnli", "dev"] = option("mnli", "training rows: the translated MNLI, or nine tenths of dev")
    language: Literal[LANGUAGES] = option("en", "language of the sentences")  # type: ignore[valid-type]


def _recipe(recipe: Any, **changes: Any) -> XnliRecipe:
    return XnliRecipe(**{each.name: getattr(recipe, each.name) for each in fields(recipe)}, **changes)


SHORT = recipes(DEV.rows)["small"]


class Xnli(Glue):
    title = "XNLI: does the second sentence follow, contradict, or neither? (15 languages)"
    paper = "Sparse Transformers, figure 2b"
    columns = DEV
    sources = {"": SOURCE, "mnli": SOURCE, "dev": SOURCE}  # "": the source text does not tell the recipe
    recipes = {
        "small": _recipe(SHORT, source="dev"),
        **{name: _recipe(recipe) for name, recipe in recipes(TRAIN.rows).items() if name != "small"},
    }

    def rows(self, part: str) -> list[Row]:
        if self.recipe.source == "mnli" and part == "train":
            path = SOURCE.find(self.data, f"multinli.train.{self.recipe.language}.tsv")
            return self._checked(str(path), read_bytes(path), TRAIN)
        rows = self._dev()
        if self.recipe.source == "mnli":
            return rows
        order = np.random.default_rng(self.seed).permutation(len(rows))
        held = -(-len(rows) // 10)
        return [rows[i] for i in (order[held:] if part == "train" else order[:held])]

    def _dev(self) -> list[Row]:
        name = f"dev-{self.recipe.language}.tsv"
        path = SOURCE.find(self.data, name, "xnli-dev.tar")
        if path.name.startswith("dev-"):
            return self._checked(str(path), read_bytes(path), DEV)
        found = [content for inside, content in members(path, lambda inside: inside.split("/")[-1] == name)]
        if not found:
            raise ValueError(f"{path} holds no {name}; get {SOURCE.what} from {SOURCE.origin}")
        return self._checked(f"{path}: {name}", found[0], DEV)

    def _checked(self, where: str, content: bytes, columns: Columns) -> list[Row]:
        rows = list(read_rows(where, content, columns))
        if len(rows) < 2:
            raise ValueError(f"{where} has {len(rows)} rows, and 2 at least are needed")
        return rows
