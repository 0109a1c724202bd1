"""What a model is built for: the inputs, the label, and what the training split says of them.

    def build(spec: ModelSpec, units: int = 64) -> keras.Model:
        inputs = spec.inputs()                               # one keras.Input a feature, raw values
        x = keras.layers.Rescaling(1 / 255)(inputs[spec.one("image")])
        ...
        return keras.Model(inputs, keras.layers.Dense(spec.num_outputs, dtype="float32")(x))

The contract: the model takes a dictionary of raw features [batch, *shape] and answers [batch, num_outputs] float32: logits
of the classes, or the number in the label's own units. All preprocessing stands inside it, so that whoever is served the
model sends what the dataset held. What preprocessing learns from data (means, vocabularies) it takes from `statistics`,
which are those of the training split and of no other; they are fixed, so that every process builds the same model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.config import Augmentation
from trainer.data.manifest import Feature, Kind, Label, Manifest
from trainer.data.statistics import FeatureStatistics, read_statistics
from trainer.errors import BadInput


@dataclass(frozen=True)
class ModelSpec:
    """The features, the label, and the statistics of the training split."""

    features: Mapping[str, Feature]
    """The inputs by name, in alphabetical order."""
    label: Label
    """What is to be told."""
    statistics: Mapping[str, FeatureStatistics]
    """Of the training split, by feature name; the label's under the label's name."""
    augmentation: tuple[Augmentation, ...] = ()
    """Random changes of the images that training asks for; `preprocessing.picture` makes the layers."""

    @property
    def task(self) -> Literal["classification", "regression"]:
        """What kind of model the label asks for."""
        return self.label.task

    @property
    def num_outputs(self) -> int:
        """One logit a class, or one number."""
        return 1 if self.label.class_names is None else len(self.label.class_names)

    def inputs(self) -> dict[str, Any]:
        """A new `keras.Input` for each feature, by name: [batch, *shape] of the feature's dtype."""
        import keras

        return {
            name: keras.Input(feature.shape, dtype=feature.dtype, name=name) for name, feature in self.features.items()
        }

    def one(self, kind: Kind) -> str:
        """The name of the only feature, which must be of this kind.

        Raises:
            BadInput: There are others, or it is of another kind.
        """
        found = [name for name, feature in self.features.items() if feature.kind == kind]
        if len(found) != 1 or len(self.features) != 1:
            have = ", ".join(f"{name} ({feature.kind})" for name, feature in self.features.items())
            raise BadInput(f"train.model: needs one {kind} and nothing else, and the data has {have}")
        return found[0]

    def output(self, values: Any) -> Any:
        """The last layer: logits, or a number brought from a standard scale into the label's own units.

        Args:
            values: [batch, units] float.
        """
        import keras

        if self.task == "classification":
            return keras.layers.Dense(self.num_outputs, dtype="float32", name="logits")(values)
        found = self.statistics[self.label.name]
        scaled = keras.layers.Dense(1, dtype="float32", name="scaled")(values)
        return keras.layers.Rescaling(found.std_dev or 1.0, offset=found.mean or 0.0, dtype="float32", name="number")(
            scaled
        )


def spec_of(manifest: Manifest, examples: Path, augmentation: Sequence[Augmentation] = ()) -> ModelSpec:
    """The spec of a prepared dataset.

    Args:
        manifest: Its manifest.
        examples: Its folder.
        augmentation: Random changes of the images while training.

    Raises:
        BadInput: Its statistics are missing or altered.
    """
    features = {name: manifest.features[name] for name in sorted(manifest.features)}
    return ModelSpec(features, manifest.label, read_statistics(examples, manifest).splits["train"], tuple(augmentation))
