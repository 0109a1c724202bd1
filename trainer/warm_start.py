"""First weights from an earlier training: a `.keras` file, a trained or registered model, or a checkpoint.

    check_source(config)                                                # BadInput where there are no such weights
    taken = warm_start(model, WarmStart(source="models/digits/3", except_layers=["dense_1"]))

Weights are paired in the order of the models. Each must fit or be excepted by its layer's name: nothing is left out silently.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from trainer import storage
from trainer.checkpoint import VARIABLES, read_weights
from trainer.config import WarmStart
from trainer.errors import BadInput
from trainer.export import KERAS_FILE
from trainer.layers import named, walk


def warm_start(model: Any, config: WarmStart) -> int:
    """Puts the weights of an earlier training into a model.

    Args:
        model: The new model.
        config: Where the weights come from and which layers keep their own.

    Returns:
        How many weights were taken over.

    Raises:
        BadInput: There are no such weights, or they do not fit.
    """
    kept: set[int] = set()
    for pattern in config.except_layers:
        found = named(model, pattern)
        if not found:
            names = ", ".join(layer.name for layer in walk(model) if layer.weights)
            raise BadInput(
                f"train.warm_start.except_layers = {json.dumps(pattern)}: matches no layer with weights (there are {names})"
            )
        kept |= {id(weight) for layer in found for weight in layer.weights}
    with tempfile.TemporaryDirectory() as temporary:
        values = _read(config.source, Path(temporary))
    shown = f"train.warm_start.source = {json.dumps(config.source)}"
    if len(values) != len(model.weights):
        raise BadInput(f"{shown}: holds {len(values)} weights, the model has {len(model.weights)}")
    pairs = [(weight, value) for weight, value in zip(model.weights, values, strict=True) if id(weight) not in kept]
    for weight, value in pairs:
        if tuple(weight.shape) != value.shape:
            raise BadInput(
                f"{shown}: {weight.path} has the shape {list(weight.shape)}, the source's {list(value.shape)}; name its"
                " layer in train.warm_start.except_layers to begin it anew"
            )
    for weight, value in pairs:
        weight.assign(value)
    return len(pairs)


def check_source(config: WarmStart) -> None:
    """Whether there are weights, without fetching them.

    Args:
        config: Where the weights come from.

    Raises:
        BadInput: There are none.
        WorldFailure: The bucket does not answer.
    """
    source = config.source if storage.is_remote(config.source) else str(Path(config.source).expanduser())
    inside = [storage.join(source, name) for name in (KERAS_FILE, f"{VARIABLES}.index")]
    if not any(storage.exists(file) for file in ([source] if source.endswith(".keras") else inside)):
        raise _no_weights(config.source)


def _no_weights(source: str) -> BadInput:
    return BadInput(
        f"train.warm_start.source = {json.dumps(source)}: is no .keras file, no folder with {KERAS_FILE}, and no checkpoint"
        + ("" if storage.is_remote(source) else f" (looked for {Path(source).expanduser().absolute()})")
    )


def _read(source: str, temporary: Path) -> list[np.ndarray]:
    """The weights in the order of the model."""
    folder = _fetched(source, temporary)
    if (folder / f"{VARIABLES}.index").is_file():
        return read_weights(folder)
    file = folder if folder.suffix == ".keras" else folder / KERAS_FILE
    if not file.is_file():
        raise _no_weights(source)
    import keras

    try:
        earlier = keras.models.load_model(file, compile=False)
    except (ValueError, TypeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"train.warm_start.source = {json.dumps(source)}: cannot be loaded ({reason})") from error
    return [keras.ops.convert_to_numpy(weight) for weight in earlier.weights]


def _fetched(source: str, temporary: Path) -> Path:
    """The source as a path of this machine."""
    if not storage.is_remote(source):
        return Path(source).expanduser()
    storage.stage(source, temporary / "source")
    return temporary / "source"
