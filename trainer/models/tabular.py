"""A model of tables: numbers are normalised, categories become learned vectors, missing values are told apart, all inside."""

from collections.abc import Sequence

import keras

from trainer.errors import BadInput
from trainer.preprocessing import column, words
from trainer.spec import ModelSpec


def build(
    spec: ModelSpec,
    hidden_units: Sequence[int] = (64, 32),
    dropout: float = 0.1,
    max_words: int = 5_000,
    embedding_size: int = 16,
) -> keras.Model:
    """Every column as numbers, side by side, then dense layers with ReLU.

    Args:
        spec: Numbers, categories and texts, at least one, and a label of any kind.
        hidden_units: Units of each hidden layer.
        dropout: Fraction of each hidden layer's units that a training step leaves out.
        max_words: Most frequent words of a text column that are told apart.
        embedding_size: Numbers that stand for a word; a text is the mean of its words.
    """
    inputs = spec.inputs()
    parts = []
    for name, feature in spec.features.items():
        if feature.kind == "image":
            raise BadInput(f"train.model = tabular: takes no images, and {name} is one")
        if feature.kind == "text":
            tokens = words(spec, name, inputs[name], max_words, None)
            num_tokens = min(max_words, len(spec.statistics[name].values) or 1) + 2
            vectors = keras.layers.Embedding(num_tokens, embedding_size, mask_zero=True)(tokens)
            parts.append(keras.layers.GlobalAveragePooling1D()(vectors))
        else:
            parts.append(column(spec, name, inputs[name]))
    x = keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    for units in hidden_units:
        x = keras.layers.Dense(units, activation="relu")(x)
        if dropout:
            x = keras.layers.Dropout(dropout)(x)
    return keras.Model(inputs, spec.output(x), name="tabular")
