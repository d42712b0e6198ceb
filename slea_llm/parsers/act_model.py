"""A light model of what a sentence does: ridge regression on sentence vectors, fitted to examples in a moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slea_llm import assets, strict_yaml
from slea_llm.errors import ConfigError, nearest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slea_llm.encoders import SentenceEncoder

    Floats = NDArray[np.float64]

FEWEST = 4
"""Examples of a kind below which nothing can be held out."""
RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0)
SHARPNESS = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Factors of the regression's values in the softmax; the pair is taken under which left-out examples are likeliest."""


class ActModel:
    """Names what sentences do. Penalty and sharpness are chosen by leaving out one example at a time.

    Every kind weighs the same, however many examples it has. `held_out` is the share of examples that are named rightly
    by a fit on the others (the mean over kinds): what to expect of sentences like them, in no other domain.
    """

    def __init__(self, examples: Mapping[str, Sequence[str]], encoder: SentenceEncoder) -> None:
        """Raises ConfigError for fewer than two kinds, or a kind with fewer than 4 examples."""
        import numpy as np

        small = sorted(name for name, texts in examples.items() if len(set(texts)) < FEWEST)
        if len(examples) < 2 or small:
            raise ConfigError(
                f"examples of {', '.join(small) or 'fewer than two kinds'}: give two kinds or more, "
                f"each with {FEWEST} sentences or more"
            )
        self.names = tuple(sorted(examples))
        self._encoder = encoder
        texts = [(text, place) for place, name in enumerate(self.names) for text in dict.fromkeys(examples[name])]
        kind = np.array([place for _, place in texts])
        rows = self._rows([text for text, _ in texts])
        # Kernel form: there are fewer examples than coordinates. Weights make the kinds count alike.
        weight = 1.0 / np.bincount(kind)[kind]
        weight *= len(kind) / weight.sum()
        goal = np.eye(len(self.names))[kind]
        best = (-np.inf, 0.0, 1.0, np.zeros_like(goal))
        for ridge in RIDGES:
            values = _left_out(rows, goal, weight, ridge)
            for sharpness in SHARPNESS:
                likely = float(weight @ np.log(_softmax(sharpness * values)[np.arange(len(kind)), kind] + 1e-12))
                best = max(best, (likely, ridge, sharpness, values), key=lambda one: one[0])
        _, ridge, self._sharpness, values = best
        self._weights = rows.T @ _dual(rows, goal, weight, ridge)
        right = values.argmax(axis=1) == kind
        self.held_out = float(np.mean([right[kind == place].mean() for place in range(len(self.names))]))

    @classmethod
    def read(cls, file: str, encoder: SentenceEncoder, known: Sequence[str]) -> ActModel:
        """Fitted to a file of data/, or at a path: kind -> language -> sentences. Raises ConfigError for another form,
        and for a kind that is not `known`."""
        path = Path(file) if Path(file).is_file() else assets.find("data", file)
        try:
            data = strict_yaml.load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path} holds {type(data).__name__} where kinds with their examples are needed")
        for name in data:
            if name not in known:
                raise ConfigError(
                    f"{path}: {name!r} is nothing that a reply does by the vocabulary; one of {', '.join(known)}"
                    f"{nearest(str(name), known)}"
                )
        return cls({name: _sentences(path, name, languages) for name, languages in data.items()}, encoder)

    def overrule(self, texts: Sequence[str], ruled: Sequence[str], *, odds: float) -> list[str]:
        """What each text does: what the rules said, unless something else is `odds` times as likely.

        A kind that the model has no examples of is left to the rules.
        """
        if not texts:
            return []
        chances = _softmax(self._sharpness * (self._rows(texts) @ self._weights))
        found = []
        for rule, row in zip(ruled, chances, strict=True):
            best = int(row.argmax())
            known = rule in self.names
            found.append(self.names[best] if known and row[best] >= odds * row[self.names.index(rule)] else rule)
        return found

    def _rows(self, texts: Sequence[str]) -> Floats:
        """(n, d + 1): sentence vectors of length 1, and a constant."""
        import numpy as np

        vectors = self._encoder.encode([" ".join(text.split()) for text in texts]).astype(np.float64)
        return np.concatenate([vectors, np.full((len(texts), 1), 0.5)], axis=1)


def _sentences(path: Path, name: str, languages: Any) -> list[str]:
    if not isinstance(languages, dict) or not all(
        isinstance(texts, list) and all(isinstance(text, str) and text.strip() for text in texts)
        for texts in languages.values()
    ):
        raise ConfigError(f"{path}: {name} needs lists of sentences by language, as in {{en: [...]}}")
    return [text for texts in languages.values() for text in texts]


def _dual(rows: Floats, goal: Floats, weight: Floats, ridge: float) -> Floats:
    """(n, kinds): coefficients of the rows in the weighted ridge regression."""
    import numpy as np

    root = np.sqrt(weight)[:, None]
    scaled = root * rows
    found: Floats = root * np.linalg.solve(scaled @ scaled.T + ridge * np.eye(len(rows)), root * goal)
    return found


def _left_out(rows: Floats, goal: Floats, weight: Floats, ridge: float) -> Floats:
    """(n, kinds): what a fit without each example says of it, by the hat matrix (Allen 1974)."""
    import numpy as np

    root = np.sqrt(weight)[:, None]
    scaled = root * rows
    kernel = scaled @ scaled.T
    hat = np.linalg.solve(kernel + ridge * np.eye(len(rows)), kernel)
    own = np.diag(hat)[:, None]
    found: Floats = (hat @ (root * goal) - own * (root * goal)) / (1.0 - own) / root
    return found


def _softmax(values: Floats) -> Floats:
    import numpy as np

    shifted = np.exp(values - values.max(axis=1, keepdims=True))
    found: Floats = shifted / shifted.sum(axis=1, keepdims=True)
    return found
