"""Subword tokenizers: byte-level byte-pair encoding (Sennrich et al. 2016; bytes as in GPT-2), trained on the data.

Every text has an encoding, so nothing is unknown but what a data set itself calls unknown, and decoding gives the text
back. WordPiece is not offered: the `tokenizers` library numbers its pieces differently in every process, so that a
run could not be repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from subquad.core.files import write_atomically
from subquad.data.cache import cache_directory, check_owner

PAD, UNK, CLS, SEP, MASK = SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # their ids are 0 … 4
FILE = "tokenizer.json"
BYTES = 256


def train_tokenizer(
    lines: Iterable[str], size: int, specials: Sequence[str] = SPECIALS, *, lowercase: bool = False
) -> Tokenizer:
    """A tokenizer with at most `size` tokens: the specials (ids 0, 1, …), the 256 bytes, the most useful merges.

    A special written in a text is that special, with the space before it. Fewer tokens come out where the text has not
    so many pairs that occur twice. A space is put before the first word of a text, so that it is the same token as
    inside a sentence.
    """
    if size < BYTES + len(specials):
        raise ValueError(
            f"size must be ≥ {BYTES + len(specials)} ({BYTES} bytes, {len(specials)} specials), not {size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[AddedToken(word, lstrip=True, special=True) for word in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def cached_tokenizer(
    lines: Sequence[str], size: int, specials: Sequence[str] = SPECIALS, *, lowercase: bool = False
) -> Tokenizer:
    """`train_tokenizer`, once: the result is kept in the cache under a hash of the text and of what was asked for."""
    digest = hashlib.sha256(repr((tokenizers.__version__, size, tuple(specials), lowercase)).encode())
    for line in lines:
        digest.update(line.encode() + b"\n")
    folder = cache_directory() / f"tokenizer-{digest.hexdigest()[:16]}"
    if (folder / FILE).exists():
        check_owner(folder / FILE)
        return load(folder)
    tokenizer = train_tokenizer(lines, size, specials, lowercase=lowercase)
    folder.mkdir(parents=True, exist_ok=True)
    save(tokenizer, folder)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Into tokenizer.json of a folder, the whole file or nothing of it."""
    write_atomically(folder / FILE, tokenizer.to_str())


def load(folder: Path) -> Tokenizer:
    """From tokenizer.json of a folder."""
    path = folder / FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: a folder with a saved tokenizer is needed")
    try:
        return Tokenizer.from_str(path.read_text())
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"{path} is not a tokenizer: {error}") from None


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Tokens as text, without specials and without the space before the first word."""
    return tokenizer.decode(list(ids)).removeprefix(" ")


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, without specials around."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def framed(a: Sequence[int], b: Sequence[int] = ()) -> dict[str, Tensor]:
    """One text or two as BERT reads them: [CLS] a [SEP], or [CLS] a [SEP] b [SEP], with the segment (0, 1) of each."""
    cls, sep = SPECIALS.index(CLS), SPECIALS.index(SEP)
    tail = [*b, sep] if len(b) else []
    ids = [cls, *a, sep, *tail]
    segments = [0] * (len(a) + 2) + [1] * len(tail)
    return {"input_ids": torch.tensor(ids), "token_type_ids": torch.tensor(segments)}
