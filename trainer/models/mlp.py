"""A multilayer perceptron on the pixels: the quickest model to try a pipeline with."""

from collections.abc import Sequence

import keras


def build(
    image_shape: Sequence[int],
    num_classes: int,
    hidden_units: Sequence[int] = (128, 64),
    dropout: float = 0.0,
) -> keras.Model:
    """Dense layers with ReLU.

    Args:
        image_shape: Height, width, channels.
        num_classes: Classes of the label.
        hidden_units: Units of each hidden layer.
        dropout: Fraction of each hidden layer's units that a training step leaves out.
    """
    images = keras.Input(image_shape, dtype="uint8", name="image")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 127.5, offset=-1.0)(images))
    for units in hidden_units:
        x = keras.layers.Dense(units, activation="relu")(x)
        if dropout:
            x = keras.layers.Dropout(dropout)(x)
    return keras.Model(images, keras.layers.Dense(num_classes, dtype="float32")(x), name="mlp")
