"""What tasks on subwords share: a tokenizer that is trained or loaded, and kept beside the trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from subquad.data import subwords
from subquad.tasks.base import Task


class TokenizedTask(Task):
    """A task whose tokens are subwords. `load` assigns `tokenizer`; a trained model is saved with it."""

    _tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RuntimeError(f"{self.name}: call load() or restore() first, which make the tokenizer")
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def ids(self, text: str) -> list[int]:
        """One text in tokens, without specials."""
        return subwords.encode_all(self.tokenizer, [text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        return subwords.text_of(self.tokenizer, ids)

    def save(self, folder: Path) -> None:
        subwords.save(self.tokenizer, folder)

    def restore(self, folder: Path) -> None:
        self.tokenizer = subwords.load(folder)
