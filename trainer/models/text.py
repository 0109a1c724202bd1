"""A text model that looks at words and their neighbours; its vocabulary stands inside it."""

import keras

from trainer.preprocessing import words
from trainer.spec import ModelSpec


def build(
    spec: ModelSpec,
    max_words: int = 20_000,
    length: int | None = None,
    embedding_size: int = 64,
    filters: int = 128,
    kernel_size: int = 3,
    dropout: float = 0.3,
) -> keras.Model:
    """Embedding, one convolution over neighbours, the strongest and the mean answer over the text, dense layers.

    After Kim, Convolutional Neural Networks for Sentence Classification, 2014.

    Args:
        spec: One text, and a label of any kind.
        max_words: Most frequent words of the training split that are told apart.
        length: Words that are looked at, from the beginning. None: enough for 95 % of the training split's texts.
        embedding_size: Numbers that stand for a word.
        filters: Filters of the convolution, and units of the layer after it.
        kernel_size: Words that one filter sees.
        dropout: Fraction that a training step leaves out, of the embedding and of the last features.
    """
    inputs = spec.inputs()
    name = spec.one("text")
    tokens = words(spec, name, inputs[name], max_words, length)
    num_tokens = min(max_words, len(spec.statistics[name].values) or 1) + 2  # padding and unknown words
    there = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(tokens, 0), "float32"), -1)
    x = keras.layers.Embedding(num_tokens, embedding_size)(tokens)
    if dropout:
        x = keras.layers.SpatialDropout1D(dropout)(x)
    x = keras.layers.Conv1D(filters, kernel_size, padding="same", activation="relu")(x * there) * there
    mean = keras.ops.sum(x, axis=1) / keras.ops.maximum(keras.ops.sum(there, axis=1), 1.0)
    x = keras.layers.Concatenate()([keras.layers.GlobalMaxPooling1D()(x), mean])
    x = keras.layers.Dense(filters, activation="relu")(x)
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    return keras.Model(inputs, spec.output(x), name="text")
