"""What an exported model answers, asked through the signature that will serve.

model = ServedModel(Path("model/saved_model"), manifest)
model(features)                # probabilities [n, classes], or numbers [n], float64
"""

from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.manifest import Manifest
from trainer.errors import BadInput


class ServedModel:
    """A SavedModel whose signature fits a dataset.

    Args:
        folder: The SavedModel.
        manifest: The dataset's.

    Raises:
        BadInput: It cannot be loaded, or its signature takes other features or answers other classes.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        import tensorflow as tf

        try:
            self._loaded = tf.saved_model.load(str(folder))  # keeps the variables that the signature reads alive
        except (OSError, ValueError) as error:
            raise BadInput(f"{folder}: is not a SavedModel: {str(error).splitlines()[0]}") from None
        self._signature = self._loaded.signatures.get("serving_default")
        if self._signature is None:
            raise BadInput(f"{folder}: has no signature serving_default")
        inputs = self._signature.structured_input_signature[1]
        takes = {name: [*spec.shape[1:], spec.dtype.name] for name, spec in inputs.items()}
        holds = {name: [*feature.shape, feature.dtype] for name, feature in manifest.features.items()}
        if takes != holds:
            raise BadInput(f"{folder}: its signature takes {_difference(takes, holds)}")
        self._key = "probabilities" if manifest.task == "classification" else "prediction"
        answers = self._signature.structured_outputs
        if self._key not in answers:
            raise BadInput(f"{folder}: answers no {self._key}, and the data is for {manifest.task}")
        self.class_names = _class_names(folder)
        names = manifest.class_names
        if names and answers[self._key].shape[-1] != len(names):
            raise BadInput(f"{folder}: answers {answers[self._key].shape[-1]} classes, the data has {len(names)}")
        if names and self.class_names is not None and self.class_names != names:
            first = next(i for i, pair in enumerate(zip(self.class_names, names, strict=True)) if pair[0] != pair[1])
            raise BadInput(
                f"{folder}: its class {first} is {self.class_names[first]!r}, the data's is {names[first]!r}"
            )

    def __call__(self, features: dict[str, np.ndarray]) -> np.ndarray:
        """The answers for a batch, finite or not."""
        import tensorflow as tf

        found: Any = self._signature(**{name: tf.constant(values) for name, values in features.items()})
        return found[self._key].numpy().astype(np.float64)


def _class_names(folder: Path) -> list[str] | None:
    from trainer.export import read_metadata

    return (read_metadata(folder) or {}).get("class_names")


def _difference(takes: dict[str, list], holds: dict[str, list]) -> str:
    """What a signature and the data do not share, in words."""
    parts = []
    for name in sorted({*takes, *holds}):
        if name not in holds:
            parts.append(f"{name} {takes[name]}, which the data has not")
        elif name not in takes:
            parts.append(f"no {name}, which the data has as {holds[name]}")
        elif takes[name] != holds[name]:
            parts.append(f"{name} as {takes[name]}, which the data has as {holds[name]}")
    return "; ".join(parts)
