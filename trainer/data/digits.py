"""`digits`: the 1,797 images of handwritten digits that scikit-learn carries, as a TensorFlow Datasets builder.

It needs no network and takes the same road as `mnist` or `cifar10`. Importing this module registers the builder.
Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

_TEST_EVERY = 5  # the set has no official test part here; every fifth image keeps all classes in both


class Digits(tfds.core.GeneratorBasedBuilder):
    """Images [8, 8, 1] uint8 with labels 0 to 9: 1,437 to train, 360 to test."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First release."}

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Handwritten digits of 8×8 pixels, from scikit-learn.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(names=[str(digit) for digit in range(10)]),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        return {"train": self._generate_examples(test=False), "test": self._generate_examples(test=True)}

    def _generate_examples(self, *, test: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]  # scikit-learn counts 0 to 16
        for index, (image, label) in enumerate(zip(images, bunch.target, strict=True)):
            if (index % _TEST_EVERY == 0) == test:
                yield index, {"image": image, "label": int(label)}
