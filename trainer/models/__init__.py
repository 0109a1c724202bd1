"""One file a model, found by its name; a user's own by `package.module:function`.

A model is a function `build(spec, **model_args) -> keras.Model`; `trainer.spec` says what it gets and what it owes.
"""

import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any

from trainer.applications import PREFIX, find_application
from trainer.config import TrainConfig
from trainer.errors import BadInput, TriremeError
from trainer.layers import freeze, synchronize_batch_norm
from trainer.own_code import check_call, fault_of, own_function
from trainer.precision import compute_in
from trainer.spec import ModelSpec


def build_model(config: TrainConfig, spec: ModelSpec) -> Any:
    """A new model with fresh weights.

    Args:
        config: The train section.
        spec: What it is built for.

    Returns:
        A `keras.Model`.

    Raises:
        BadInput: No such model, wrong arguments, or a model that does not keep the contract.
    """
    build = find_build(config)
    try:
        with compute_in(config.precision):
            model = build(spec, **config.model_args)
    except (
        TriremeError,
        OSError,
        MemoryError,
    ):  # the world's: pretrained weights that could not be fetched, a full disk
        raise
    except Exception as error:
        setting = f"train.model = {json.dumps(config.model)}"
        if config.model_args:
            setting = f"train.model_args = {json.dumps(config.model_args)}: {config.model}"
        raise BadInput(f"{setting} cannot be built for {_shown(spec)}: {fault_of(error)}") from error
    _check_contract(config.model, model, spec)
    for wanted in spec.augmentation:
        if wanted.layer not in {type(layer).__name__ for layer in model._flatten_layers()}:
            raise BadInput(
                f"train.augmentation: {config.model} makes no use of it; trainer.preprocessing.picture would"
            )
    freeze(model, config.frozen_layers)
    if config.sync_batch_norm:
        synchronize_batch_norm(model)
    return model


def find_build(config: TrainConfig) -> Callable[..., Any]:
    """The `build` function that the section names, once `model_args` are known to be arguments of it.

    Raises:
        BadInput: No such model, or it does not take the arguments.
    """
    build = _find(config.model)
    accepted = dict(list(inspect.signature(build).parameters.items())[1:])  # without the spec
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        for key in config.model_args:
            if key not in accepted:
                known = ", ".join(accepted) or "none"
                raise BadInput(f"train.model_args.{key}: {config.model} takes no such argument (it takes {known})")
    setting = f"train.model = {json.dumps(config.model)}"
    check_call(build, None, setting=setting, takes="spec and train.model_args", **config.model_args)
    return build


def _find(name: str) -> Any:
    if name.startswith(PREFIX):
        return find_application(name)
    if ":" not in name:
        return importlib.import_module(f"trainer.models.{name}").build
    return own_function(name, setting="train.model")


def _check_contract(name: str, model: Any, spec: ModelSpec) -> None:
    """Tries the model on an empty batch, which costs nothing and needs no particular kind of model."""
    import keras
    import tensorflow as tf

    if not isinstance(model, keras.Model):
        raise BadInput(f"train.model = {json.dumps(name)}: build returned {type(model).__name__}, not a keras.Model")
    wanted = {name: keras.KerasTensor((None, *f.shape), dtype=f.dtype, name=name) for name, f in spec.features.items()}
    try:
        output = model.compute_output_spec(wanted) if model.built else model(
            {name: tf.zeros((1, *f.shape), f.dtype) for name, f in spec.features.items()}
        )  # fmt: skip
    except Exception as error:
        reason = fault_of(error)
        raise BadInput(
            f"train.model = {json.dumps(name)}: does not take a dictionary of {_shown(spec)}: {reason}"
        ) from error
    if not hasattr(output, "shape"):
        raise BadInput(
            f"train.model = {json.dumps(name)}: must answer one tensor for {_shown(spec)}, and answers a"
            f" {type(output).__name__} of {len(output)}"
        )
    shape = tuple(output.shape)[1:]
    if shape != (spec.num_outputs,):
        raise BadInput(
            f"train.model = {json.dumps(name)}: must answer ['batch', {spec.num_outputs}] for {_shown(spec)},"
            f" and answers {['batch', *shape]}"
        )


def _shown(spec: ModelSpec) -> str:
    return ", ".join(f"{name} {feature.kind} {list(feature.shape)}" for name, feature in spec.features.items())
