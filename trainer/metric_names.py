"""The metrics by name: to which task each belongs, whether lower is better, and where it lies. Imports nothing heavy.

lower_is_better("loss")                    # True
names_of("regression", [0.1, 0.9])         # (…, "pinball_0.1", "pinball_0.9")
"""

import math
from collections.abc import Sequence

CLASSIFICATION = (
    "accuracy",
    "top_k_accuracy",
    "loss",
    "macro_precision", "macro_recall", "macro_f1",
    "micro_precision", "micro_recall", "micro_f1",
    "weighted_precision", "weighted_recall", "weighted_f1",
    "roc_auc",
    "pr_auc",
    "brier",
    "expected_calibration_error",
)  # fmt: skip
REGRESSION = ("mean_absolute_error", "root_mean_squared_error", "r2")
ALL = (*CLASSIFICATION, *REGRESSION)

_LOWER = frozenset({"loss", "brier", "expected_calibration_error", "mean_absolute_error", "root_mean_squared_error"})
_RANGES = {"brier": (0.0, 2.0), "r2": (-math.inf, 1.0)}
_PINBALL = "pinball_"


def names_of(task: str, quantiles: Sequence[float]) -> tuple[str, ...]:
    """Metrics of a task, in the order in which they are shown."""
    return CLASSIFICATION if task == "classification" else (*REGRESSION, *map(pinball_name, quantiles))


def pinball_name(quantile: float) -> str:
    """The pinball loss at a quantile."""
    return f"{_PINBALL}{quantile:g}"


def lower_is_better(name: str) -> bool:
    """Whether the smaller value is the better one."""
    return name in _LOWER or name.startswith(_PINBALL)


def is_fraction(name: str) -> bool:
    """Whether the metric lies between 0 and 1."""
    return range_of(name) == (0.0, 1.0)


def range_of(name: str) -> tuple[float, float]:
    """The lowest and the highest value that the metric can have; of one's own metrics nothing is known."""
    if name in _RANGES:
        return _RANGES[name]
    if name in ("loss", *REGRESSION) or name.startswith(_PINBALL):
        return 0.0, math.inf
    return (0.0, 1.0) if name in CLASSIFICATION else (-math.inf, math.inf)
