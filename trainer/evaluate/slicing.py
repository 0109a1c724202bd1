"""Which examples belong to which slice: by the values of features, by ranges, by crosses, by class, by one's own function.

slicers = [Slicer(slicing, index, manifest) for index, slicing in enumerate(config.slices)]
slicers[0](features, labels)            # for each example of a batch the name of its slice, or None
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from trainer.config import Slicing
from trainer.data.manifest import Manifest
from trainer.errors import BadInput
from trainer.own_code import ask_own, own_function

MOST_SLICES = 200
"""Of one slicing: the largest ones are measured."""


class Slicer:
    """One way to take a split apart.

    Args:
        slicing: What the configuration says.
        index: Its place in `evaluate.slices`, for messages.
        manifest: The dataset's.

    Raises:
        BadInput: It names a feature that is not there or cannot be sliced by, or a function that cannot be imported.
    """

    def __init__(self, slicing: Slicing, index: int, manifest: Manifest) -> None:
        self._setting = f"evaluate.slices.{index}"
        self._function: Callable | None = None
        self._parts: list[tuple[str, Callable[[np.ndarray], list[str]]]] = []
        self.expected: list[str] = []
        """Names that there must be even if no example has them."""
        self._label = manifest.label.name
        if slicing.function:
            self._function = own_function(slicing.function, setting=f"{self._setting}.function")
            return
        for name in slicing.by:
            if name == manifest.label.name and manifest.class_names:
                names = [f"{name} = {each}" for each in manifest.class_names]
                self._add(name, names, lambda values, names=names: [names[value] for value in values])
            elif name in slicing.bins:
                self._need(name, manifest, ("number",), "cannot be cut into ranges")
                edges = slicing.bins[name]
                names = [f"{name} < {edges[0]:g}"]
                names += [f"{low:g} ≤ {name} < {high:g}" for low, high in pairwise(edges)]
                names.append(f"{name} ≥ {edges[-1]:g}")
                self._add(name, names, _ranges(name, names, np.array(edges)))
            else:
                self._need(name, manifest, ("number", "category", "text"), "has no values to slice by")
                self._add(name, [], _values(name))
        if len(self._parts) > 1:
            self.expected = []

    def __call__(self, features: dict[str, np.ndarray], labels: np.ndarray) -> list[str | None]:
        """The slice of each example.

        Args:
            features: By name [n, …].
            labels: [n].

        Raises:
            BadInput: One's own function raises, or does not give a name, or None, for each example.
        """
        if self._function is not None:
            answered = ask_own(self._function, features, labels, setting=f"{self._setting}.function")
            if isinstance(answered, str) or not isinstance(answered, Iterable):
                raise BadInput(f"{self._setting}.function: gave {answered!r}; must give a name for each example")
            names: list[Any] = list(answered)
            if len(names) != len(labels):
                raise BadInput(f"{self._setting}.function: gave {len(names)} names for {len(labels)} examples")
            return [None if name is None else str(name) for name in names]
        columns = [part(labels if name == self._label else features[name]) for name, part in self._parts]
        return [", ".join(names) for names in zip(*columns, strict=True)]

    def _add(self, name: str, expected: list[str], part: Callable[[np.ndarray], list[str]]) -> None:
        self._parts.append((name, part))
        self.expected = expected

    def _need(self, name: str, manifest: Manifest, kinds: tuple[str, ...], rule: str) -> None:
        if name == manifest.label.name:
            return
        if name not in manifest.features:
            known = ", ".join([*manifest.features, manifest.label.name])
            raise BadInput(f"{self._setting}.by = {name}: no such feature (the data has {known})")
        feature = manifest.features[name]
        if feature.kind not in kinds or feature.shape:
            raise BadInput(f"{self._setting}.by = {name}: is {feature.kind} {list(feature.shape)}, which {rule}")


def _ranges(name: str, names: list[str], edges: np.ndarray) -> Callable[[np.ndarray], list[str]]:
    def part(values: np.ndarray) -> list[str]:
        places = np.searchsorted(edges, values, side="right")
        return [
            f"{name} missing" if missing else names[place]
            for place, missing in zip(places, np.isnan(values), strict=True)
        ]

    return part


def _values(name: str) -> Callable[[np.ndarray], list[str]]:
    def shown(value: Any) -> str:
        if isinstance(value, bytes):
            value = value.decode("utf-8", errors="replace")
        elif not isinstance(value, str):
            value = "" if np.isnan(value) else f"{value:g}"
        return f"{name} = {value}" if value else f"{name} missing"

    return lambda values: [shown(value) for value in values]
