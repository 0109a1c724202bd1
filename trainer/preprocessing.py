"""Preprocessing as layers of the model: learned from the training split's statistics, exported with the model.

x = picture(spec, inputs)                         # one image → [batch, height, width, channels] float, −1 to 1
parts = [column(spec, name, inputs[name]) for name in spec.features]
tokens = words(spec, name, inputs[name], max_words=10_000, length=None)
"""

from typing import Any

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
    for layer in spec.augmentation:
        x = layer(x)
    return keras.layers.Rescaling(1 / 127.5, offset=-1.0)(x)


def column(spec: ModelSpec, name: str, value: Any) -> Any:
    """One column of a table as [batch, width] float: a number or a category.

    A number becomes (number − mean) / standard deviation, 0 where it is missing, and beside it whether it is missing,
    if one ever was. A category becomes a learned vector; those that training never saw share one, and so do missing ones.

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
    values = [entry.value for entry in found.values]
    known = [*(["[MISSING]"] if "" not in values else []), *values]
    filled = keras.layers.StringLookup(vocabulary=known, num_oov_indices=1, name=f"{name}_lookup")(
        _MissingAsWord(name=f"{name}_missing")(value)
    )
    width = min(_WIDEST_EMBEDDING, round(1.6 * (len(known) + 1) ** 0.56))  # as fastai and TensorFlow's guides size them
    return keras.layers.Flatten()(keras.layers.Embedding(len(known) + 1, width, name=f"{name}_embedding")(filled))


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
        length = max(1, round(found.quantiles[-2])) if found.quantiles else 1
    vocabulary = [entry.value for entry in found.values[:max_words]] or ["[EMPTY]"]
    return keras.layers.TextVectorization(
        vocabulary=vocabulary, output_sequence_length=length, name=f"{name}_words"
    )(value)  # fmt: skip


def _missing_as_word() -> type:
    import keras
    import tensorflow as tf

    @keras.saving.register_keras_serializable("trireme", "MissingAsWord")
    class MissingAsWord(keras.layers.Layer):
        """Empty strings become `[MISSING]`, so that a missing category has a vector of its own."""

        def call(self, inputs: Any) -> Any:
            return tf.where(tf.equal(inputs, ""), tf.constant("[MISSING]"), inputs)

        def compute_output_spec(self, inputs: Any) -> Any:
            return keras.KerasTensor(inputs.shape, dtype="string")

    return MissingAsWord
