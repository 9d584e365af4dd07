"""What language models share, whatever their tokens: three texts, windows over them, entropies to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from subquad.core.options import option
from subquad.data.datasets import PackedDocuments, Windows
from subquad.tasks.base import Splits, Task
from subquad.tasks.recipe import Recipe

COUNTED = 50_000_000  # tokens whose pairs are counted
Texts = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens of the training, validation and test text


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe(Recipe):
    """`train_size` and `eval_size` count windows: the first ones of the training, validation and test text."""

    path: str | None = option(None, "the text file of source=file")
    stride: int | None = option(None, "step of the windows of an evaluation; None = length, no overlap", ge=1)
    pack: bool = option(False, "fill windows with whole documents that do not see each other, in place of a stride")

    def check_task(self) -> None:
        source = vars(self)["source"]  # of the tasks
        if (source == "file") != (self.path is not None):
            raise ValueError(f"path must be given with source=file, and only then (source={source})")
        if not self.pack and self.stride is not None and self.stride > self.length:
            raise ValueError(f"stride must be at most length={self.length}, not {self.stride}; none: no overlap")


class Language(Task):
    """A causal language model over long texts. A kind of token writes `texts`, `bounds`, `vocabulary`, `encode`,
    `decode`.
    """

    head = "causal-lm"
    larger_is_better = False
    needs_data = True

    def load(self) -> Splits:
        r = self.recipe
        train, valid, test = self.texts()
        self.train = train
        for part, text in zip(("training", "validation", "test"), (train, valid, test), strict=True):
            if len(text) < 2:
                raise ValueError(f"{self.name}: the {part} text has {len(text)} tokens, and needs 2 at least")
        if r.pack:
            parts = [PackedDocuments(text, self.bounds(text), r.length, size)
                     for text, size in ((train, r.train_size), (valid, r.eval_size), (test, r.eval_size))]  # fmt: skip
            self.valid, self.test = (part.tokens[: part.cuts[len(part)]] for part in parts[1:])
            return Splits(*parts)
        self.valid, self.test = (first(text, r.length, r.stride or r.length, r.eval_size) for text in (valid, test))
        return Splits(
            Windows(first(train, r.length, r.length, r.train_size), r.length),
            Windows(self.valid, r.length, r.stride),
            Windows(self.test, r.length, r.stride),
        )

    def texts(self) -> Texts:
        """Read the data."""
        raise NotImplementedError

    def bounds(self, text: np.ndarray) -> np.ndarray:
        """Where the documents of a text begin, and its end, (D + 1,)."""
        raise NotImplementedError

    def baselines(self) -> dict[str, float]:
        """Bits per token of the test text under its own unigram and bigram statistics (after `load`)."""
        unigram, bigram = entropies(self.test)
        return {"unigram": unigram, "bigram": bigram}


def first(text: np.ndarray, length: int, stride: int, windows: int | None) -> np.ndarray:
    """The part of a text that its first windows cover."""
    return text if windows is None else text[: length + (windows - 1) * stride]


def after(ends: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Bounds of documents (D + 1,) from the places of their last tokens."""
    return np.unique(np.concatenate([[0], ends + 1, [len(text)]]))


def entropies(tokens: np.ndarray) -> tuple[float, float]:
    """(H(x_t), H(x_t | x_{t-1})) in bits: what the best model without context, and with one token of it, could reach.

    The statistics are those of the very text that is measured, so no model of these two kinds does better on it; for
    words, most pairs of which occur once in a short text, the second is far below what can be learned.
    """
    tokens = np.asarray(tokens, dtype=np.int64)  # (N,)
    pairs = tokens[:-1] * (tokens.max() + 1) + tokens[1:]
    return entropy(tokens), entropy(pairs) - entropy(tokens[:-1])


def learned_bigram(known: np.ndarray, asked: np.ndarray, vocabulary: int) -> float:
    """Bits per token of a text `asked` under the pairs of a text `known`: what a model that sees one token can learn.

    p(b | a) = (count(ab) + T(a) p(b)) / (count(a) + T(a)), where T(a) different tokens follow a (Witten and Bell 1991)
    and p(b) = (count(b) + 1) / (N + V). Of a long text the first `COUNTED` tokens are known.
    """
    known, asked = (np.asarray(text, np.int64) for text in (known[:COUNTED], asked))
    alone = (np.bincount(known, minlength=vocabulary) + 1.0) / (len(known) + vocabulary)  # (V,)
    pairs, counts = np.unique(known[:-1] * vocabulary + known[1:], return_counts=True)  # (P,), sorted
    followed = np.bincount(known[:-1], minlength=vocabulary)
    kinds = np.bincount(pairs // vocabulary, minlength=vocabulary)
    before, after = asked[:-1], asked[1:]  # (M,)
    wanted = before * vocabulary + after
    places = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    seen = np.where(pairs[places] == wanted, counts[places], 0)
    weight = np.where(kinds[before] > 0, kinds[before], 1)  # after a token that nothing follows: p(b)
    return float(-np.log2((seen + weight * alone[after]) / (followed[before] + weight)).mean())


def entropy(symbols: np.ndarray) -> float:
    share = np.unique(symbols, return_counts=True)[1] / len(symbols)
    return float(-(share * np.log2(share)).sum())
