"""One file a model, found by its name; a user's own by `package.module:function`.

A model is a function `build(image_shape, num_classes, **model_args) -> keras.Model` that maps raw images
[batch, height, width, channels] uint8 to logits [batch, num_classes] float32, with all its preprocessing inside, so that
whoever is served the model sends what the dataset held.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.applications import PREFIX, find_application
from trainer.config import TrainConfig
from trainer.errors import BadInput
from trainer.layers import freeze, synchronize_batch_norm
from trainer.precision import compute_in


def build_model(config: TrainConfig, image_shape: Sequence[int], num_classes: int) -> Any:
    """A new model with fresh weights.

    Args:
        config: The train section.
        image_shape: Height, width and channels.
        num_classes: How many classes the label has.

    Returns:
        A `keras.Model`.

    Raises:
        BadInput: No such model, wrong arguments, or a model that does not keep the contract.
    """
    build = find_model(config.model)
    accepted = inspect.signature(build).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        for key in config.model_args:
            if key not in accepted or key in ("image_shape", "num_classes"):
                known = ", ".join(name for name in accepted if name not in ("image_shape", "num_classes")) or "none"
                raise BadInput(f"train.model_args.{key}: {config.model} takes no such argument (it takes {known})")
    try:
        with compute_in(config.precision):
            model = build(image_shape=tuple(image_shape), num_classes=num_classes, **config.model_args)
    except (TypeError, ValueError) as error:
        given = json.dumps(config.model_args)
        raise BadInput(
            f"train.model_args = {given}: {config.model} cannot be built with images of {list(image_shape)}: "
            + str(error).strip().splitlines()[0]
        ) from error
    _check_contract(config.model, model, tuple(image_shape), num_classes)
    freeze(model, config.frozen_layers)
    if config.sync_batch_norm:
        synchronize_batch_norm(model)
    return model


def find_model(name: str) -> Any:
    """The `build` function of a model's name.

    Raises:
        BadInput: There is none.
    """
    if name.startswith(PREFIX):
        return find_application(name)
    module_name, _, function = name.partition(":")
    if not function:
        return importlib.import_module(f"trainer.models.{module_name}").build
    if str(Path.cwd()) not in sys.path:  # a user's module stands beside their configuration
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadInput(f"train.model = {json.dumps(name)}: cannot be imported: {error}") from None
    if not callable(getattr(module, function, None)):
        raise BadInput(f"train.model = {json.dumps(name)}: {module_name} has no function {function}")
    return getattr(module, function)


def _check_contract(name: str, model: Any, image_shape: tuple[int, ...], num_classes: int) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise BadInput(f"train.model = {json.dumps(name)}: build returned {type(model).__name__}, not a keras.Model")
    output = model.output_shape if hasattr(model, "output_shape") else None
    if tuple(model.input_shape or ()) != (None, *image_shape) or tuple(output or ()) != (None, num_classes):
        raise BadInput(
            f"train.model = {json.dumps(name)}: must map images {['batch', *image_shape]} to logits"
            f" ['batch', {num_classes}], and maps {list(model.input_shape)} to {list(output or ())}"
        )
