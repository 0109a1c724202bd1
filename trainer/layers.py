"""Layers by name: which are frozen, which share the statistics of the global batch.

Names are those that Keras gives in a fresh process (`dense`, `dense_1`, …) or that the model's author gave.
"""

import fnmatch
import json
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.errors import BadInput


def walk(layer: Any) -> Iterator[Any]:
    """Every layer inside a model that holds no further layers, in the order of the model."""
    inner = getattr(layer, "layers", [])
    for part in inner:
        yield from walk(part)
    if not inner:
        yield layer


def freeze(model: Any, patterns: Sequence[str]) -> None:
    """Takes the layers whose names match a pattern out of the training.

    A frozen BatchNormalization keeps its statistics too.

    Raises:
        BadInput: A pattern matches no layer with weights, or nothing is left to train.
    """
    for pattern in patterns:
        found = named(model, pattern)
        if not found:
            names = ", ".join(layer.name for layer in walk(model) if layer.weights)
            raise BadInput(
                f"train.frozen_layers = {json.dumps(pattern)}: matches no layer with weights (there are {names})"
            )
        for layer in found:
            layer.trainable = False
    if patterns and not model.trainable_variables:
        raise BadInput(f"train.frozen_layers = {json.dumps(list(patterns))}: leaves nothing to train")


def named(model: Any, pattern: str) -> list[Any]:
    """Layers with weights whose name matches a pattern as a shell's does."""
    return [layer for layer in walk(model) if layer.weights and fnmatch.fnmatchcase(layer.name, pattern)]


def synchronize_batch_norm(model: Any) -> None:
    """Makes every BatchNormalization add its sums over all replicas.

    Raises:
        BadInput: There is none, so that the setting would do nothing.
    """
    layers = batch_norms(model)
    if not layers:
        raise BadInput("train.sync_batch_norm = true: the model has no BatchNormalization layer")
    for layer in layers:
        layer.synchronized = True


def batch_norms(model: Any) -> list[Any]:
    """The BatchNormalization layers that gather statistics, which frozen ones do not."""
    import keras

    return [layer for layer in walk(model) if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]
