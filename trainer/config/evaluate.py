"""How a model is measured, what it must reach, and what its export must do."""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer import metric_names
from trainer.config.section import IMPORT_PATH, PositiveFloat, PositiveInt, Problem, Section, suggestion


class Threshold(Section):
    """What a metric must reach. Whether higher or lower is better is known for each metric."""

    value_threshold: float | None = None
    """The value itself must be at least (for a loss: at most) this."""
    change_threshold: float | None = None
    """The value must be better than the champion's on the same examples by at least this; negative allows it to be that
    much worse. Without a champion this rule does not apply."""
    relative: bool = False
    """Whether `change_threshold` is a fraction of the champion's value rather than a difference in the metric's units."""
    confidence: Literal["estimate", "bound"] = "estimate"
    """What decides: the value that was found, or the unfavourable end of its interval (`evaluate.confidence_level`), so
    that chance alone does not bless."""

    def problems(self) -> Iterator[Problem]:
        """A threshold that asks for nothing, or says how to read what is not there."""
        if self.value_threshold is None and self.change_threshold is None:
            yield Problem("value_threshold", None, "a threshold needs value_threshold, change_threshold or both")
        elif self.relative and self.change_threshold is None:
            yield Problem("relative", True, "says how change_threshold is meant, and there is none")


class Slicing(Section):
    """A way to take the test split apart, and what each of its slices must reach."""

    by: Annotated[list[str], Field(max_length=4)] = []
    """Features whose values make the slices; several make crosses. The label's name slices by class."""
    bins: dict[str, Annotated[list[float], Field(min_length=1)]] = {}
    """Edges, growing, that cut a number of `by` into ranges: `{age: [18, 65]}` makes three."""
    function: str | None = None
    """Your own instead, as `package.module:function`: it takes features by name [n, …] and labels [n], and gives a name
    for the slice of each example, or None for those that are in none."""
    thresholds: dict[str, Threshold] = {}
    """What each slice must reach, by metric, besides the thresholds for the whole split."""

    def problems(self) -> Iterator[Problem]:
        """A slicing by nothing, by two things at once, or with edges that do not grow."""
        if bool(self.by) == bool(self.function):
            yield Problem("by", self.by, "a slicing needs either by or function")
        for name, edges in self.bins.items():
            if name not in self.by:
                yield Problem(f"bins.{name}", edges, "is not among by")
            elif any(low >= high for low, high in itertools.pairwise(edges)):
                yield Problem(f"bins.{name}", edges, "edges must grow")
        if self.function is not None and not IMPORT_PATH.fullmatch(self.function):
            yield Problem("function", self.function, "must be package.module:function")


class OwnMetric(Section):
    """A metric of your own."""

    function: str
    """As `package.module:function`: it takes labels [n] (class indices or numbers) and answers (probabilities
    [n, classes] or numbers [n]), and gives one number."""
    lower_is_better: bool = False
    """Which way is better."""

    def problems(self) -> Iterator[Problem]:
        """A function that cannot be named."""
        if not IMPORT_PATH.fullmatch(self.function):
            yield Problem("function", self.function, "must be package.module:function")


class EvaluateConfig(Section):
    """How the model is measured on the test split and what it has to reach."""

    batch_size: PositiveInt = 256
    """Examples per call of the exported model; no metric depends on it."""
    thresholds: dict[str, Threshold] | None = None
    """What each named metric must reach for the model to be blessed. None: accuracy (of numbers: mean_absolute_error)
    must be no worse than the champion's."""
    slices: list[Slicing] = []
    """Ways to take the test split apart."""
    min_slice_examples: Annotated[int, Field(ge=2)] = 30
    """Slices with fewer examples are shown and not judged."""
    confidence_level: Annotated[float, Field(ge=0.5, le=0.999)] = 0.95
    """How often an interval holds the true value."""
    accept_new_baseline: bool = False
    """Whether a champion that cannot be measured on this data (other features or classes) may be replaced all the same;
    then only value thresholds decide."""
    top_k: PositiveInt = 5
    """`top_k_accuracy` counts an example whose class is among so many most probable ones."""
    quantiles: list[Annotated[float, Field(gt=0.0, lt=1.0)]] = []
    """Quantiles of which the pinball loss is measured, as `pinball_0.9`; for labels that are numbers."""
    own_metrics: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], OwnMetric] = {}
    """Metrics of your own by name."""
    num_mistakes: Annotated[int, Field(ge=0, le=100)] = 24
    """How many of the worst mistakes the report shows."""

    def lower_is_better(self, metric: str) -> bool:
        """Whether the smaller value of a metric, perhaps one's own, is the better one."""
        own = self.own_metrics.get(metric)
        return own.lower_is_better if own else metric_names.lower_is_better(metric)

    def problems(self) -> Iterator[Problem]:
        """Thresholds that no model can reach or miss, and metrics that do not exist."""
        for name, metric in self.own_metrics.items():
            if name in metric_names.ALL or name.startswith("pinball"):
                yield Problem(f"own_metrics.{name}", metric.function, "is the name of a metric that is there already")
            for problem in metric.problems():
                yield problem._replace(path=f"own_metrics.{name}.{problem.path}")
        for index, slicing in enumerate(self.slices):
            for problem in slicing.problems():
                yield problem._replace(path=f"slices.{index}.{problem.path}")
        for path, thresholds in self.thresholds_by_path():
            yield from self._threshold_problems(path, thresholds)

    def thresholds_by_path(self) -> Iterator[tuple[str, dict[str, Threshold]]]:
        """Those of the whole split and of each slicing, with their place in this section."""
        yield "thresholds", self.thresholds or {}
        for index, slicing in enumerate(self.slices):
            yield f"slices.{index}.thresholds", slicing.thresholds

    def _threshold_problems(self, path: str, thresholds: dict[str, Threshold]) -> Iterator[Problem]:
        known = [*metric_names.ALL, *map(metric_names.pinball_name, self.quantiles), *self.own_metrics]
        for metric, threshold in thresholds.items():
            if metric not in known:
                rule = f"must be one of {', '.join(known)}" + suggestion(metric, known)
                yield Problem(f"{path}.{metric}", threshold.model_dump(exclude_defaults=True), rule)
            for problem in threshold.problems():
                yield problem._replace(path=f"{path}.{metric}.{problem.path}")
            if metric not in self.own_metrics:
                for problem in _range_problems(metric, threshold):
                    yield problem._replace(path=f"{path}.{metric}.{problem.path}")


def _range_problems(metric: str, threshold: Threshold) -> Iterator[Problem]:
    """Thresholds that no model can reach, or that none can miss, because of where the metric lies."""
    low, high = metric_names.range_of(metric)
    lower = metric_names.lower_is_better(metric)
    if math.isfinite(low):
        place = (
            f"{metric} lies between {low:g} and {high:g}" if math.isfinite(high) else f"{metric} is at least {low:g}"
        )
    else:
        place = f"{metric} is at most {high:g}"
    value, change = threshold.value_threshold, threshold.change_threshold
    if value is not None and not low <= value <= high:
        yield Problem("value_threshold", value, place)
    elif value == 1.0 and metric_names.is_fraction(metric) and not lower and threshold.confidence == "bound":
        yield Problem(
            "value_threshold",
            value,
            f"{place}, and the lower end of an interval is below 1 with any number of examples",
        )
    if change is None:
        return
    if not threshold.relative and abs(change) > high - low:
        yield Problem("change_threshold", change, f"{place}, so two models differ by at most {high - low:g}")
    elif threshold.relative and lower and change > 1.0:
        yield Problem("change_threshold", change, f"{place}, so none is better by more than the champion's whole value")
    elif threshold.relative and not lower and low == 0.0 and change < -1.0:
        yield Problem("change_threshold", change, f"{place}, so none is worse by more than the champion's whole value")


class ServingConfig(Section):
    """What the export must do in a fresh process with nothing but TensorFlow, before it may be promoted."""

    tolerance: PositiveFloat = 1e-5
    """Largest difference from the trainer's own answers: of probabilities as they are, of numbers over 1 relative."""
    num_requests: Annotated[int, Field(ge=20)] = 200
    """Requests of one example that are timed."""
    max_load_secs: PositiveFloat = 60.0
    """Longest time to load the model, the import of TensorFlow not counted."""
    max_p50_ms: PositiveFloat | None = None
    """Longest time that half of the requests of one example may take. None: no limit."""
    max_p99_ms: PositiveFloat | None = 1000.0
    """Longest time that 99 of 100 requests of one example may take. None: no limit."""
    max_memory_bytes: PositiveInt = 4 * 1024**3
    """Most memory that the process may take, TensorFlow's own half gigabyte included."""
    timeout_secs: PositiveFloat = 600.0
    """After this the check is ended and has failed."""
