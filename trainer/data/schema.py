"""What data is expected to look like: made from a training split, kept in git or with a model, held against later data.

schema = infer_schema(manifest, statistics)
schema = read_schema(text, path="schema.json")        # BadInput says what is wrong with it
"""

import json
from typing import Annotated, Any

from pydantic import Field

from trainer.config import Fraction, KindName, Section, parse_json
from trainer.data.manifest import Manifest
from trainer.data.statistics import FeatureStatistics, Statistics

SCHEMA_FILE = "schema.json"

_MOST_LISTED_VALUES = 1000
_ROOM = 0.5  # of the span, left free on either side of the numbers that training saw


class FeatureSchema(Section):
    """What is expected of one feature or of the label."""

    kind: KindName
    """As in the manifest."""
    shape: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Shape of one example's value."""
    max_missing_fraction: Fraction = 1.0
    """Most of the examples that may be without a value."""
    low: float | None = None
    """No number is smaller. None: there is no bound."""
    high: float | None = None
    """No number is larger. None: there is no bound."""
    values: list[str] | None = None
    """The categories or classes there are. None: any."""
    max_new_fraction: Fraction = 0.0
    """Most of the examples that may hold a value that is not listed."""


class Schema(Section):
    """What is expected of a dataset."""

    features: dict[str, FeatureSchema]
    """The inputs by name."""
    label_name: str
    """Name of the label."""
    label: FeatureSchema
    """What is expected of it."""

    def to_text(self) -> str:
        """The schema as JSON that a person can read and edit."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), indent=1, ensure_ascii=False) + "\n"


def infer_schema(manifest: Manifest, statistics: Statistics) -> Schema:
    """A schema that the training split keeps, with some room: to begin with and to edit.

    Numbers may lie half the span outside what was seen; twice as many values may be missing, and none where none was;
    categories are listed where there are at most 1,000.
    """
    train = statistics.splits["train"]
    features = {
        name: _inferred(train[name], feature.shape, name) for name, feature in sorted(manifest.features.items())
    }
    label = _inferred(train[manifest.label.name], (), manifest.label.name)
    if manifest.label.class_names is not None:
        label = label.model_copy(update={"values": list(manifest.label.class_names)})
    return Schema(features=features, label_name=manifest.label.name, label=label)


def read_schema(text: str, path: str) -> Schema:
    """A schema from its JSON. Raises BadInput."""
    return parse_json(Schema, text, path=path)


def _inferred(found: FeatureStatistics, shape: tuple[int, ...], name: str) -> FeatureSchema:
    settings: dict[str, Any] = {"kind": found.kind, "shape": shape}
    settings["max_missing_fraction"] = min(1.0, 2 * found.num_missing / max(1, found.num_examples))
    if found.kind == "number" and found.low is not None:
        room = _ROOM * (found.high - found.low)
        settings |= {"low": found.low - room, "high": found.high + room}
    if found.kind == "category" and (found.num_distinct or 0) <= _MOST_LISTED_VALUES:
        settings["values"] = sorted(value.value for value in found.values)
    return FeatureSchema(**settings)
