"""Preprocessing as layers of the model: learned from the training split's statistics, exported with the model.

x = picture(spec, inputs)                         # one image → [batch, height, width, channels] float, −1 to 1
parts = [column(spec, name, inputs[name]) for name in spec.features]
tokens = words(spec, name, inputs[name], max_words=10_000, length=None)
"""

import json
from typing import Any

from trainer.config import Augmentation, suggestion
from trainer.errors import BadInput
from trainer.spec import ModelSpec

_WIDEST_EMBEDDING = 32


def picture(spec: ModelSpec, inputs: dict[str, Any]) -> Any:
    """The spec's only image, scaled to −1 … 1 after the random changes of `train.augmentation`.

    Args:
        spec: What the model is built for.
        inputs: As `spec.inputs()` gives them.
    """
    import keras

    x = keras.layers.Rescaling(1.0)(inputs[spec.one("image")])
    for wanted in spec.augmentation:
        x = _random_layer(wanted)(x)
    return keras.layers.Rescaling(1 / 127.5, offset=-1.0)(x)


def column(spec: ModelSpec, name: str, value: Any) -> Any:
    """One column of a table as [batch, width] float: a number or a category.

    A number becomes (number − mean) / standard deviation, 0 where it is missing, and beside it whether it is missing,
    if one ever was. A category becomes a learned vector; those that training never saw share one, and missing ones have
    one of their own.

    Args:
        spec: What the model is built for.
        name: The feature.
        value: [batch, *shape] float32 or [batch] string.
    """
    import keras

    found = spec.statistics[name]
    if spec.features[name].kind == "number":
        if not spec.features[name].shape:
            value = keras.layers.Reshape((1,))(value)
        missing = keras.ops.isnan(value)
        scaled = (value - (found.mean or 0.0)) / (found.std_dev or 1.0)
        parts = [keras.ops.where(missing, 0.0, scaled)]
        if found.num_missing:
            parts.append(keras.ops.cast(missing, "float32"))
        flat = [keras.layers.Flatten()(part) for part in parts]
        return keras.layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
    known = [*([""] if found.num_missing else []), *(entry.value for entry in found.values)]
    places = keras.layers.StringLookup(vocabulary=known, num_oov_indices=1, name=f"{name}_lookup")(value)
    width = min(_WIDEST_EMBEDDING, round(1.6 * (len(known) + 1) ** 0.56))  # as fastai and TensorFlow's guides size them
    return keras.layers.Flatten()(keras.layers.Embedding(len(known) + 1, width, name=f"{name}_embedding")(places))


def words(spec: ModelSpec, name: str, value: Any, max_words: int, length: int | None) -> Any:
    """A text as numbers of words [batch, length] int64: 0 padding, 1 a word that training never saw.

    Args:
        spec: What the model is built for.
        name: The feature.
        value: [batch] string.
        max_words: Most frequent words of the training split that are told apart.
        length: Words that are looked at. None: enough for 95 % of the training split's texts.
    """
    import keras

    found = spec.statistics[name]
    if length is None:
        length = max(1, round(found.quantile(95) or 1))
    vocabulary = [entry.value for entry in found.values[:max_words]] or ["[EMPTY]"]
    return keras.layers.TextVectorization(
        vocabulary=vocabulary, output_sequence_length=length, name=f"{name}_words"
    )(value)  # fmt: skip


def _random_layer(wanted: Augmentation) -> Any:
    import keras

    layer = getattr(keras.layers, wanted.layer, None)
    if layer is None:
        known = sorted(name for name in dir(keras.layers) if name.startswith("Random"))
        raise BadInput(f"train.augmentation: Keras has no layer {wanted.layer}{suggestion(wanted.layer, known)}")
    try:
        return layer(**wanted.args)
    except (TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(
            f"train.augmentation: {wanted.layer} cannot be made with {json.dumps(wanted.args)}: {reason}"
        ) from None
