"""A small convolutional network for small images."""

from collections.abc import Sequence

import keras

from trainer.preprocessing import picture
from trainer.spec import ModelSpec


def build(
    spec: ModelSpec,
    filters: Sequence[int] = (32, 64),
    dense_units: int = 128,
    dropout: float = 0.0,
) -> keras.Model:
    """Blocks of two 3×3 convolutions and a halving, then one dense layer.

    Args:
        spec: One image, and a label of any kind.
        filters: Filters of each block; every block but the last halves height and width, as long as both exceed 3.
        dense_units: Units of the layer before the logits.
        dropout: Fraction of those units that a training step leaves out.
    """
    inputs = spec.inputs()
    x = picture(spec, inputs)
    for block, width in enumerate(filters):
        x = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        if min(x.shape[1:3]) > 3 or block == 0:
            x = keras.layers.MaxPooling2D(2, padding="same")(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(dense_units, activation="relu")(x)
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    return keras.Model(inputs, spec.output(x), name="cnn")
