"""A multilayer perceptron on the pixels: the quickest model to try a pipeline with."""

from collections.abc import Sequence

import keras

from trainer.preprocessing import picture
from trainer.spec import ModelSpec


def build(
    spec: ModelSpec,
    hidden_units: Sequence[int] = (128, 64),
    dropout: float = 0.0,
) -> keras.Model:
    """Dense layers with ReLU.

    Args:
        spec: One image, and a label of any kind.
        hidden_units: Units of each hidden layer.
        dropout: Fraction of each hidden layer's units that a training step leaves out.
    """
    inputs = spec.inputs()
    x = picture(spec, inputs)
    x = keras.layers.Flatten()(x)
    for units in hidden_units:
        x = keras.layers.Dense(units, activation="relu")(x)
        if dropout:
            x = keras.layers.Dropout(dropout)(x)
    return keras.Model(inputs, spec.output(x), name="mlp")
