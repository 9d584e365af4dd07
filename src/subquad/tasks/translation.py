"""Translation: an encoder–decoder over a shared subword vocabulary, beam search, BLEU by sacrebleu.

Parallel plain-text files, one sentence a line, as Multi30k (task 1), WMT and IWSLT give them. Checkpoints are chosen by
the perplexity of the validation part; the test part is translated by beam search once, at the end, and measured by
sacrebleu (cased, 13a tokenisation; its default). The choice where the papers are silent: pairs longer than `length`
subwords are left out of training, and cut in testing.

`paper` is appendix G.3 of Yun et al. 2020: six blocks, width 256, 8 heads, feed-forward 1024, sentences up to 256
subwords, Adafactor; they train on 15 million pairs of WMT18 en-cs with batches of 4096 tokens on each of 8 chips, here
taken as 1024 sentences (of about 32 subwords), and test on newstest2015 (2,656 pairs of en-cs). For de-en and en-de:
--set origin=de --set target=en, and the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.core.options import option
from subquad.data import subwords
from subquad.data.datasets import Examples
from subquad.data.files import Source, member, read_lines
from subquad.tasks.base import Example, Splits
from subquad.tasks.recipe import Recipe
from subquad.tasks.tokenized import TokenizedTask

SPECIALS = PAD, START, END = ("[PAD]", "<s>", "</s>")  # ids 0, 1, 2


@dataclass(frozen=True)
class Corpus:
    """Where the parts of a parallel corpus are; {l} is a language, {test} the test set that the recipe names. A part
    may stand in a tar of its own.
    """

    source: Source
    train: tuple[str, ...]
    valid: tuple[str, ...]
    test: tuple[str, ...]


MULTI30K = Source(
    "multi30k", "Multi30k task 1, raw: {train,val,test_2016_flickr}.{en,de,fr,cs}.gz", "multi30k/dataset on GitHub"
)
CORPORA = {
    "multi30k": Corpus(
        MULTI30K,
        ("train.{l}",), ("val.{l}",), ("test_2016_flickr.{l}",),
    ),
    "wmt": Corpus(
        Source("wmt", "WMT parallel text as train.{l}, newstest2013.{l} and {test}.{l}",
               "the WMT pages, statmt.org"),
        ("train.{l}",), ("newstest2013.{l}", "valid.{l}"), ("{test}.{l}", "test.{l}"),
    ),
    "iwslt15": Corpus(
        Source("iwslt15-en-vi", "IWSLT'15 en-vi: train.{l}, tst2012.{l}, tst2013.{l} (or the tgz of dev and test)",
               "the Stanford NLP page on neural machine translation"),
        ("train.{l}",), ("tst2012.{l}", "dev-2012-en-vi.tgz"), ("tst2013.{l}", "test-2013-en-vi.tgz"),
    ),
    "files": Corpus(
        Source(".", "parallel text files train.{l}, valid.{l}, test.{l}", "wherever you have them"),
        ("train.{l}",), ("valid.{l}",), ("test.{l}",),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TranslationRecipe(Recipe):
    source: Literal["multi30k", "wmt", "iwslt15", "files"] = option(
        "multi30k", "corpus; files: --data names the folder"
    )
    origin: str = option("en", "language to translate from")
    target: str = option("de", "language to translate into")
    test: Literal["newstest2015", "newstest2014"] = option("newstest2015", "source=wmt: the test set")
    subwords: int = option(8000, "size of the shared vocabulary", ge=300)
    beams: int = option(4, "beams of the search", ge=1)
    penalty: float = option(1.0, "length penalty of the search")

    def check_task(self) -> None:
        if self.origin == self.target:
            raise ValueError(f"origin and target are both {self.origin!r}")


class Translation(TokenizedTask):
    title = "translate sentences (Multi30k, WMT, IWSLT or your own parallel files)"
    paper = "Yun et al. 2020, section 5 and appendix G.3"
    head = "seq2seq"
    metric = "perplexity"
    larger_is_better = False
    needs_data = True
    sources = {"multi30k": MULTI30K}
    recipes = {
        "small": TranslationRecipe(
            length=48, width=128, layers=2, heads=4, feedforward=256, dropout=0.1, steps=1500,
            batch=64, rate=2e-3, warmup=150, smoothing=0.1, evaluate=300, eval_size=200, subwords=6000, beams=2,
        ),
        "paper": TranslationRecipe(
            source="wmt", target="cs", length=256, width=256, layers=6, heads=8, feedforward=1024, dropout=0.1,
            steps=240_000, batch=1024, rate=1e-3, warmup=10_000, schedule="sqrt", optimizer="adafactor", smoothing=0.1,
            evaluate=5000, subwords=32_000,
        ),
    }  # fmt: skip

    def load(self) -> Splits:
        r, corpus = self.recipe, CORPORA[self.recipe.source]
        parts = [self._read(corpus, names) for names in (corpus.train, corpus.valid, corpus.test)]
        limits = (r.train_size, r.eval_size, r.eval_size)
        parts = [[side[:limit] for side in part] for part, limit in zip(parts, limits, strict=True)]
        self.tokenizer = subwords.cached_tokenizer([*parts[0][0], *parts[0][1]], r.subwords, SPECIALS)
        return Splits(*(self._examples(part, cut=number > 0) for number, part in enumerate(parts)))

    def _read(self, corpus: Corpus, names: tuple[str, ...]) -> list[list[str]]:
        """The sentences of both languages; files of unequal length are an error."""
        r, sides, paths = self.recipe, [], []
        for language in (r.origin, r.target):
            path = corpus.source.find(self.data, *(name.format(l=language, test=r.test) for name in names))
            paths.append(path)
            sides.append(sentences(path, language))
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{paths[0]} has {len(sides[0]):,} lines and {paths[1]} {len(sides[1]):,}: parallel files have equally "
                "many"
            )
        if not sides[0]:
            raise ValueError(f"{paths[0]} is empty")
        return sides

    def _examples(self, part: Sequence[Sequence[str]], *, cut: bool) -> Pairs:
        length = self.recipe.length
        pairs = zip(*(subwords.encode_all(self.tokenizer, side) for side in part), strict=True)
        kept = [
            ([*x[: length - 1], 2], [*y[: length - 1], 2])
            for x, y in pairs
            if x and y and (cut or max(len(x), len(y)) < length)
        ]
        if not kept:
            raise ValueError(f"translation: no pair has both sides within length={length}")
        return Pairs(kept, list(part[1]) if cut else [])

    def vocabulary(self) -> dict[str, Any]:
        size = self.tokenizer.get_vocab_size()
        return {
            "vocab_size": size,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        }

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Both sides padded, each to its own longest."""
        sources = super().collate([{"input_ids": example["input_ids"]} for example in examples])
        targets = super().collate([{"input_ids": x["labels"], "labels": x["labels"]} for x in examples])
        return {**sources, "labels": targets["labels"]}

    def finish(self, model: Any, dataset: Any) -> dict[str, float]:
        """BLEU of the translations of a part, by sacrebleu."""
        import sacrebleu

        translated = self.translate(
            model, [example["input_ids"] for example in (dataset[i] for i in range(len(dataset)))]
        )
        return {"bleu": sacrebleu.corpus_bleu(translated, [dataset.references]).score}

    @torch.no_grad()
    def translate(self, model: Any, sources: Sequence[Tensor], batch: int = 32) -> list[str]:
        """Beam search; sentences of like length go together, the order is kept."""
        r, tokenizer = self.recipe, self.tokenizer
        model.eval()
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        texts: dict[int, str] = {}
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            inputs = super().collate([{"input_ids": sources[i]} for i in chosen])
            longest = min(r.length - 1, 2 * inputs["input_ids"].shape[1] + 8)
            ids = model.generate(
                **inputs, num_beams=r.beams, max_new_tokens=longest, length_penalty=r.penalty, do_sample=False,
                early_stopping=r.beams > 1,
            )  # fmt: skip
            texts.update({i: subwords.text_of(tokenizer, row.tolist()) for i, row in zip(chosen, ids, strict=True)})
        return [texts[i] for i in range(len(sources))]

    def encode(self, text: str) -> Example:
        return {"input_ids": torch.tensor([*self.ids(text)[: self.recipe.length - 1], 2])}

    def reply(self, model: Any, text: str) -> str:
        return self.translate(model, [self.encode(text)["input_ids"]])[0]


class Pairs(Examples):
    """Sentence pairs; `references` are the target sentences as they were written (test parts only)."""

    def __init__(self, pairs: Sequence[tuple[list[int], list[int]]], references: list[str]) -> None:
        super().__init__([x for x, _ in pairs], [y for _, y in pairs])  # type: ignore[arg-type]
        self.references = references


def sentences(path: Path, language: str) -> list[str]:
    """One sentence a line, from a file or from the member of a tar that is named after the language."""
    if path.suffix in (".tgz", ".tar"):
        return member(path, f".{language}").decode("utf-8").splitlines()
    return [line for _, line in read_lines(path)]
