"""A residual network for small images; groups instead of batches are normalised, so the number of replicas changes nothing."""

from collections.abc import Sequence
from typing import Any

import keras

from trainer.preprocessing import picture
from trainer.spec import ModelSpec


def build(
    spec: ModelSpec,
    filters: Sequence[int] = (32, 64, 128),
    blocks_per_stage: int = 2,
    groups: int = 8,
    dropout: float = 0.0,
) -> keras.Model:
    """He et al., Identity Mappings in Deep Residual Networks, 2016, with group normalisation (Wu and He, 2018).

    Args:
        spec: One image, and a label of any kind.
        filters: Filters of each stage; every stage after the first halves height and width.
        blocks_per_stage: Residual blocks of two 3×3 convolutions in each stage.
        groups: Groups of channels that are normalised together; every number of filters is a multiple of it.
        dropout: Fraction of the last features that a training step leaves out.
    """
    for width in filters:
        if width % groups:
            raise ValueError(f"filters = {list(filters)}: {width} is no multiple of groups = {groups}")
    inputs = spec.inputs()
    x = keras.layers.Conv2D(filters[0], 3, padding="same", use_bias=False)(picture(spec, inputs))
    for stage, width in enumerate(filters):
        for block in range(blocks_per_stage):
            x = _block(x, width, 2 if stage and not block else 1, groups)
    x = keras.layers.Activation("relu")(keras.layers.GroupNormalization(groups)(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    return keras.Model(inputs, spec.output(x), name="resnet")


def _block(x: Any, width: int, strides: int, groups: int) -> Any:
    y = keras.layers.Activation("relu")(keras.layers.GroupNormalization(groups)(x))
    same = x.shape[-1] == width and strides == 1
    shortcut = x if same else keras.layers.Conv2D(width, 1, strides, padding="same", use_bias=False)(y)
    y = keras.layers.Conv2D(width, 3, strides, padding="same", use_bias=False)(y)
    y = keras.layers.Activation("relu")(keras.layers.GroupNormalization(groups)(y))
    y = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(y)
    return keras.layers.Add()([shortcut, y])
