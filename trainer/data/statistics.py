"""What is in a dataset, found in one streaming pass with flat memory: the same numbers on every machine.

    collector = Collector(feature)
    collector.add(values)                 # a batch, in the order of the source
    collector.merge(other)                # of the examples that follow
    collector.result()                    # FeatureStatistics

Sums are exact (`math.fsum`), quantiles come from a histogram whose buckets are cut from the bits of the number, and the
number of different values from the smallest hashes, so that nothing depends on the processor or on who read which part.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import Section, parse_json
from trainer.data.manifest import STATISTICS_FILE, Kind, Manifest, read_utf8
from trainer.errors import BadInput

NUM_QUANTILES = 100
_KEPT_VALUES = 20_000  # most different categories or words that are told apart in the end
_COUNTED_VALUES = 100_000  # and while counting; the rarest are dropped beyond
LONGEST_VALUE = 100
"""Characters: what is longer is no category, no class and no word, and is not counted by itself."""
_SHOWN_BINS = 30
_SKETCH_SIZE = 4096
_PIXELS_EVERY = 16  # pixels of every so many images are counted; sizes of all
_STRIPPED = re.compile(rb"""[!"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~']""")  # as keras.layers.TextVectorization does


class ValueCount(Section):
    """A value and how often it is there."""

    value: str
    """A category, a word, a class name or `height×width`."""
    count: int
    """Times."""


class Bin(Section):
    """One bar of a histogram."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    count: int
    """Values between them."""


class FeatureStatistics(Section):
    """One feature (or the label) in one split. What does not apply to its kind is None or empty."""

    kind: Kind
    """As in the manifest; a label that is a class is a `category`."""
    num_examples: int
    """Examples looked at."""
    num_missing: int = 0
    """Examples without a value (a feature of several numbers: those with at least one missing)."""
    num_distinct: int | None = None
    """Different values: exact up to 4,096, beyond that within about 3 %. None for images."""
    mean: float | None = None
    """Of the numbers; of the pixels; of the words in a text."""
    std_dev: float | None = None
    """Population standard deviation of the same."""
    low: float | None = None
    """Smallest of the same."""
    high: float | None = None
    """Largest of the same."""
    num_zeros: int | None = None
    """Numbers that are 0."""
    quantiles: list[float] = []
    """101 of them, from 0 % to 100 %, each within 0.4 % of a value that stands there. For texts, of their words."""
    histogram: list[Bin] = []
    """Equal steps from `low` to `high`, counts to within the sketch's buckets."""
    values: list[ValueCount] = []
    """Categories, words of texts (lower-case, without punctuation) or image sizes, most frequent first; at most 20,000,
    and none longer than 100 characters."""

    def quantile(self, percent: int) -> float | None:
        """The value that so many percent do not exceed; None where there are no numbers."""
        return self.quantiles[percent] if self.quantiles else None


class Statistics(Section):
    """Everything counted, by split and feature; the label is among the features."""

    splits: dict[str, dict[str, FeatureStatistics]]
    """Statistics by split and name."""
    shared_examples: dict[str, int] = {}
    """Leakage: `train/test` → examples of the second split whose features are also in the first. Pairs with none are
    left out."""


class Collector:
    """Statistics of one feature of one split; batches come in the order of the source.

    Args:
        kind: The feature's kind.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.num_examples = self.num_missing = 0
        self._numbers = _Numbers()
        self._values: Counter[str] = Counter()
        self._hashes: set[int] = set()
        self._pixels = np.zeros(256, np.int64)

    def add(self, values: Sequence[Any] | np.ndarray, rows: np.ndarray | None = None) -> None:
        """Adds a batch: numbers [n, …], images (any sizes, uint8) or strings.

        Args:
            values: The batch.
            rows: Which of them count, as indices. None: all.
        """
        count = len(values) if rows is None else len(rows)
        if self.kind == "image":
            first = -self.num_examples % _PIXELS_EVERY
            looked_at = range(first, count, _PIXELS_EVERY) if rows is None else rows[first::_PIXELS_EVERY].tolist()
            pixels = [np.asarray(values[place]).reshape(-1) for place in looked_at]
            if pixels:
                self._pixels += np.bincount(np.concatenate(pixels), minlength=256)
            self.num_examples += count
            return
        if rows is not None:
            values = picked(values, rows)
        if self.kind == "number":
            rows = (
                np.asarray(values, np.float32).reshape(len(values), -1) if len(values) else np.empty((0, 1), np.float32)
            )
            self.num_missing += int(np.isnan(rows).any(axis=1).sum())
            found = rows[~np.isnan(rows)].astype(np.float64)
            self._numbers.add(found)
            self._add_hashes(np.unique(found).tolist())
        else:
            self._add_strings(list(values))
        self.num_examples += count

    def count_sizes(self, sizes: Sequence[str]) -> None:
        """Adds the `height×width` of images as they were before they were resized."""
        self._values.update(sizes)

    def merge(self, other: "Collector") -> None:
        """Adds what another collector found in the examples that follow."""
        self.num_examples += other.num_examples
        self.num_missing += other.num_missing
        self._numbers.merge(other._numbers)
        self._pixels += other._pixels
        self._values.update(other._values)
        self._hashes |= other._hashes
        self._prune()

    def result(self) -> FeatureStatistics:
        """What was found."""
        common = {"kind": self.kind, "num_examples": self.num_examples, "num_missing": self.num_missing}
        ranked = sorted(self._values.items(), key=lambda item: (-item[1], item[0]))[:_KEPT_VALUES]
        values = [ValueCount(value=value, count=count) for value, count in ranked]
        if self.kind == "category":
            return FeatureStatistics(**common, num_distinct=self._num_distinct(), values=values)
        numbers = self._numbers.summary()
        if self.kind == "image":
            numbers = _Numbers.of_counts(self._pixels).summary()
            return FeatureStatistics(**common, **numbers, values=values)
        return FeatureStatistics(**common, **numbers, num_distinct=self._num_distinct(), values=values)

    def to_json(self) -> dict[str, Any]:
        """Its state as plain data."""
        return {
            "kind": self.kind,
            "num_examples": self.num_examples,
            "num_missing": self.num_missing,
            "numbers": self._numbers.to_json(),
            "values": dict(self._values),
            "hashes": sorted(self._hashes),
            "pixels": self._pixels.tolist(),
        }

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> "Collector":
        """A collector from its state."""
        made = cls(state["kind"])
        made.num_examples, made.num_missing = state["num_examples"], state["num_missing"]
        made._numbers = _Numbers.from_json(state["numbers"])
        made._values, made._hashes = Counter(state["values"]), set(state["hashes"])
        made._pixels = np.array(state["pixels"], np.int64)
        return made

    def _add_strings(self, values: list[str]) -> None:
        self.num_missing += sum(not value for value in values)
        found = [value for value in values if value]
        self._add_hashes(set(found))
        if self.kind == "text":
            lengths = []
            for value in found:
                words = split_words(value)
                lengths.append(len(words))
                self._values.update(word for word in words if len(word) <= LONGEST_VALUE)
            self._numbers.add(np.array(lengths, np.float64))
        else:
            self._values.update(value for value in found if len(value) <= LONGEST_VALUE)
        self._prune()

    def _add_hashes(self, values: Any) -> None:
        self._hashes.update(hash64(repr(value)) for value in values)
        if len(self._hashes) > 2 * _SKETCH_SIZE:
            self._hashes = set(sorted(self._hashes)[:_SKETCH_SIZE])

    def _num_distinct(self) -> int:
        if len(self._hashes) < _SKETCH_SIZE:
            return len(self._hashes)
        kth = sorted(self._hashes)[_SKETCH_SIZE - 1]
        return round((_SKETCH_SIZE - 1) / (kth / 2**64))  # Bar-Yossef et al., Counting Distinct Elements, 2002

    def _prune(self) -> None:
        if len(self._values) > 2 * _COUNTED_VALUES:
            kept = sorted(self._values.items(), key=lambda item: (-item[1], item[0]))[:_COUNTED_VALUES]
            self._values = Counter(dict(kept))


def picked(values: Any, rows: np.ndarray) -> Any:
    """Some of a batch's values, an array or a list."""
    return values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows.tolist()]


class _Numbers:
    """Moments and a histogram. A bucket is an exponent and the first seven bits after it: 0.4 % of the value wide."""

    def __init__(self) -> None:
        self.count = self.zeros = 0
        self.mean = self.squares = 0.0
        self.low, self.high = math.inf, -math.inf
        self.buckets: Counter[int] = Counter()

    def add(self, values: np.ndarray) -> None:
        values = values[np.isfinite(values)]
        if not len(values):
            return
        other = _Numbers()
        other.count, other.zeros = len(values), int((values == 0).sum())
        other.mean = math.fsum(values) / len(values)
        other.squares = math.fsum((values - other.mean) ** 2)
        other.low, other.high = float(values.min()), float(values.max())
        keys, counts = np.unique(_bucket(values), return_counts=True)
        other.buckets = Counter(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
        self.merge(other)

    @classmethod
    def of_counts(cls, counts: np.ndarray) -> "_Numbers":
        """Those of whole numbers from 0 on, by how often each is there."""
        made = cls()
        places = np.flatnonzero(counts)
        if not len(places):
            return made
        weights = counts[places].astype(np.float64)
        made.count, made.zeros = int(counts.sum()), int(counts[0])
        made.mean = math.fsum(weights * places) / made.count
        made.squares = math.fsum(weights * (places - made.mean) ** 2)
        made.low, made.high = float(places[0]), float(places[-1])
        for key, count in zip(_bucket(places.astype(np.float64)).tolist(), counts[places].tolist(), strict=True):
            made.buckets[key] += count
        return made

    def merge(self, other: "_Numbers") -> None:
        """Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979."""
        if not other.count:
            return
        total = self.count + other.count
        distance = other.mean - self.mean
        self.mean += distance * other.count / total
        self.squares += other.squares + distance * distance * self.count * other.count / total
        self.count, self.zeros = total, self.zeros + other.zeros
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.buckets.update(other.buckets)

    def summary(self) -> dict[str, Any]:
        if not self.count:
            return {}
        return {
            "mean": self.mean,
            "std_dev": math.sqrt(self.squares / self.count),
            "low": self.low,
            "high": self.high,
            "num_zeros": self.zeros,
            "quantiles": self._quantiles(),
            "histogram": self._histogram(),
        }

    def _quantiles(self) -> list[float]:
        keys = sorted(self.buckets)
        middles = np.clip([_middle(key) for key in keys], self.low, self.high)
        reached = np.cumsum([self.buckets[key] for key in keys])
        ranks = np.arange(1, NUM_QUANTILES) / NUM_QUANTILES * self.count
        return [self.low, *middles[np.searchsorted(reached, ranks)].tolist(), self.high]

    def _histogram(self) -> list[Bin]:
        width = (self.high - self.low) / _SHOWN_BINS
        if width <= 0 or not math.isfinite(width):
            return [Bin(low=self.low, high=self.high, count=self.count)]
        counts = [0] * _SHOWN_BINS
        for key, count in self.buckets.items():
            place = int((_middle(key) - self.low) / width)
            counts[min(max(place, 0), _SHOWN_BINS - 1)] += count
        return [
            Bin(low=self.low + index * width, high=self.low + (index + 1) * width, count=count)
            for index, count in enumerate(counts)
        ]

    def to_json(self) -> list[Any]:
        low, high = (self.low, self.high) if self.count else (None, None)
        return [self.count, self.zeros, self.mean, self.squares, low, high, sorted(self.buckets.items())]

    @classmethod
    def from_json(cls, state: list[Any]) -> "_Numbers":
        made = cls()
        made.count, made.zeros, made.mean, made.squares, low, high, buckets = state
        if made.count:
            made.low, made.high = low, high
        made.buckets = Counter(dict(buckets))
        return made


def _bucket(values: np.ndarray) -> np.ndarray:
    """Bucket numbers of float64 values, growing with the value: sign, exponent and seven bits of the fraction."""
    bits = np.ascontiguousarray(values + 0.0).view(np.int64)
    size = (bits & 0x7FFFFFFFFFFFFFFF) >> 45
    return np.where(bits < 0, -size, size)


def _middle(key: int) -> float:
    size = np.array([(abs(key) << 45) | (1 << 44) if key else 0], np.int64).view(np.float64)[0]
    return float(-size if key < 0 else size)


def split_words(text: str) -> list[str]:
    """Words as `keras.layers.TextVectorization` finds them: lower-case (A to Z), without punctuation, cut at blanks."""
    return [word.decode() for word in _STRIPPED.sub(b"", text.encode().lower()).split()]


def hash64(text: str) -> int:
    """64 bits that are the same on every machine and in every version of every library."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def write_statistics(folder: Path, statistics: Statistics) -> str:
    """Writes `statistics.json`, through to the disk, and returns its digest."""
    text = json.dumps(statistics.model_dump(mode="json"), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    with (folder / STATISTICS_FILE).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256((text + "\n").encode()).hexdigest()


def read_statistics(folder: Path, manifest: Manifest) -> Statistics:
    """The statistics of a prepared dataset.

    Raises:
        BadInput: They are missing, or not those that the manifest speaks of.
    """
    file = folder / STATISTICS_FILE
    text = read_utf8(file)
    if hashlib.sha256(text.encode()).hexdigest() != manifest.statistics_sha256:
        raise BadInput(f"{file}: was altered; prepare the data again")
    return parse_json(Statistics, text, path=str(file))
