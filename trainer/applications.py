"""Any `keras.applications` architecture by name, behind this project's contract: raw images in, logits out.

build = find_application("keras.applications.MobileNetV2")
model = build(spec, dropout=0.2)
"""

import difflib
import inspect
import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from trainer.errors import BadInput
from trainer.preprocessing import picture
from trainer.spec import ModelSpec

PREFIX = "keras.applications."


def find_application(name: str) -> Callable[..., Any]:
    """The `build` function of an architecture.

    Args:
        name: `keras.applications.<Architecture>`.

    Raises:
        BadInput: Keras has no such architecture.
    """
    found = _architectures()
    short = name.removeprefix(PREFIX)
    if short not in found:
        near = difflib.get_close_matches(short, found, n=1)
        hint = f"; did you mean {PREFIX}{near[0]}?" if near else f" (it has {', '.join(sorted(found))})"
        raise BadInput(f"train.model = {json.dumps(name)}: Keras has no such architecture{hint}")
    architecture, module = found[short]

    def build(
        spec: ModelSpec,
        weights: str | None = None,
        dropout: float = 0.0,
        input_size: Sequence[int] | None = None,
        architecture_args: dict[str, Any] | None = None,
    ) -> Any:
        """The architecture without its head, averaged over the image, and a new head.

        Args:
            spec: One image of 1 or 3 channels, and a label of any kind.
            weights: A weights file, or `imagenet`, which needs a network. None: fresh weights.
            dropout: Fraction of the averaged features that a training step leaves out.
            input_size: Height and width that images are resized to. None: as they are.
            architecture_args: Further arguments of the architecture, such as `alpha`.
        """
        import keras

        height, width, channels = spec.features[spec.one("image")].shape
        if channels not in (1, 3):
            raise ValueError(f"images of {channels} channels; these architectures see 1 or 3")
        inputs = spec.inputs()
        x = keras.layers.Rescaling(127.5, offset=127.5)(picture(spec, inputs))  # back to 0 … 255
        if input_size is not None:
            x = keras.layers.Resizing(*input_size)(x)
        if channels == 1:
            x = keras.layers.Concatenate()([x, x, x])
        x = module.preprocess_input(x)
        size = tuple(input_size or (height, width))
        backbone = architecture(
            include_top=False, weights=weights, input_shape=(*size, 3), pooling="avg", **(architecture_args or {})
        )
        x = backbone(x)
        if dropout:
            x = keras.layers.Dropout(dropout)(x)
        return keras.Model(inputs, spec.output(x), name=short.lower())

    return build


def _architectures() -> dict[str, tuple[Callable[..., Any], ModuleType]]:
    """Architecture and the module with its `preprocess_input`, by name."""
    import keras

    modules = [module for module in vars(keras.applications).values() if inspect.ismodule(module)]
    return {
        name: (function, module)
        for module in modules
        if hasattr(module, "preprocess_input")
        for name, function in vars(module).items()
        if name[0].isupper() and inspect.isfunction(function)
    }
