"""Intervals that hold the true value as often as they say, also for 30 examples; and comparisons on the same examples.

    interval(name, estimate, 0.95)                 # (low, high), or None where nothing can be said
    change(name, one, other, 0.95, lower_is_better=True)      # the gain, its interval, the p-value of no difference

Proportions: the exact interval of Clopper and Pearson. Other fractions: the same for the number of examples that would
give a plain proportion the same variance, which keeps its shape near 0 and 1, where percentile and normal intervals fail.
Means and what is made of them: resampling by counts, studentised, because losses are skewed; from 1,000 examples on the t
distribution, from which resampling then no longer differs. Where too few examples leave an interval that holds the truth less
often than in nine of ten cases, none is given.
"""

import functools
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from trainer.evaluate.estimates import Estimate
from trainer.metric_names import is_fraction

_NUM_DRAWS = 2000
_RESAMPLED_UP_TO = 1000
_SEED = 20_110_311
"""Any number: intervals of the same examples must be the same."""


class Change(NamedTuple):
    """Candidate against baseline on the same examples; a gain above 0 is an improvement, whatever the metric."""

    gain: float
    low: float | None
    high: float | None
    """Ends of the gain's interval; None where nothing can be said."""
    p_value: float | None
    """Probability of a difference at least as large if there were none: exact McNemar for proportions; for other
    fractions that of the interval which just reaches 0; else Student's t."""


def interval(name: str, found: Estimate, level: float) -> tuple[float, float] | None:
    """An interval that holds the true value in a share `level` of cases, or None where nothing can be said.

    Args:
        name: The metric.
        found: Its estimate.
        level: Above 0 and below 1.
    """
    if found.value is None:
        return None
    if found.hits is not None:
        return clopper_pearson(int(found.hits.sum()), len(found.hits), level)
    if found.influence is None or len(found.influence) < found.needed:
        return None
    if is_fraction(name):
        return _limits(found)(level)
    value, moved = found.value, found.influence
    if name == "root_mean_squared_error":
        return _root_of_mean(value**2 + 2 * value * moved, level)
    if found.ratio is not None:
        return _explained(*found.ratio, level)
    return _resampled(value, moved, level)


def clopper_pearson(hits: float, count: float, level: float) -> tuple[float, float]:
    """The exact interval of a proportion (Clopper and Pearson, The Use of Confidence or Fiducial Limits, 1934).

    For whole numbers it holds every true value at least as often as it says. Numbers that are not whole are those of Korn and
    Graubard (Confidence Intervals for Proportions with Small Expected Number of Positive Counts, 1998): what a sample is worth.

    Args:
        hits: Examples that count; need not be whole.
        count: Examples, above 0; need not be whole.
        level: Above 0 and below 1.
    """
    from scipy.special import betaincinv

    tail, misses = 0.5 - level / 2, max(0.0, count - hits)
    low = float(betaincinv(hits, misses + 1, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, misses, 1 - tail)) if misses > 0 else 1.0
    rate = min(1.0, hits / count)
    return min(rate, low), max(rate, high)


def change(name: str, candidate: Estimate, baseline: Estimate, level: float, *, lower_is_better: bool) -> Change | None:
    """How much better the candidate is, or None where one of the two has no value."""
    if candidate.value is None or baseline.value is None:
        return None
    sign = -1.0 if lower_is_better else 1.0
    gain = sign * (candidate.value - baseline.value)
    if candidate.hits is not None and baseline.hits is not None:
        return _paired_proportions(gain, candidate.hits, baseline.hits, level)
    if candidate.influence is None or baseline.influence is None or len(candidate.influence) < 2:
        return Change(gain, None, None, None)
    found = _paired_numbers(gain, sign * (candidate.influence - baseline.influence), level)
    if not is_fraction(name):
        return found
    if found.low == found.high:  # the two answer alike
        return found
    if len(candidate.influence) < max(candidate.needed, baseline.needed):
        return Change(gain, None, None, None)
    low, high, p_value = _paired_fractions(candidate, baseline, level)
    low, high = (low, high) if sign > 0 else (-high, -low)
    return Change(gain, low, high, p_value)


def _paired_proportions(gain: float, candidate: np.ndarray, baseline: np.ndarray, level: float) -> Change:
    """Bonett and Price, Adjusted Wald Confidence Interval for a Difference of Binomial Proportions Based on Paired Data,
    2012, wider by one example's share because counts are whole; McNemar's test in its exact form."""
    from scipy.special import bdtr

    gained, lost, count = int((candidate & ~baseline).sum()), int((baseline & ~candidate).sum()), len(candidate)
    up, down = (gained + 1) / (count + 2), (lost + 1) / (count + 2)
    half = _normal_quantile(level) * math.sqrt((up + down - (up - down) ** 2) / (count + 2)) + 1 / (count + 2)
    p_value = min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))
    return Change(gain, max(-1.0, up - down - half), min(1.0, up - down + half), p_value)


def _paired_fractions(one: Estimate, other: Estimate, level: float) -> tuple[float, float, float]:
    """The ends and the p-value of a difference, from the two intervals and the correlation of their errors (Zou and Donner,
    Construction of Confidence Limits about Effect Measures, 2008), which keeps what exact intervals know of 0 and 1."""
    spread = float(one.influence.std() * other.influence.std())
    tied = float(np.mean(one.influence * other.influence)) / spread if spread > 0 else 0.0
    limits, other_limits = _limits(one), _limits(other)
    difference = one.value - other.value

    def distance(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a + b * b - 2 * tied * a * b))

    def ends(level: float) -> tuple[float, float]:
        (low, high), (other_low, other_high) = limits(level), other_limits(level)
        down = distance(one.value - low, other_high - other.value)
        up = distance(high - one.value, other.value - other_low)
        return max(-1.0, difference - down), min(1.0, difference + up)

    # The p-value that belongs to the interval: how far its level must rise until a difference of 0 is inside.
    certain, chance = 0.0, 1.0
    for _ in range(20):
        middle = (certain + chance) / 2
        low, high = ends(middle)
        if low <= 0 <= high:
            chance = middle
        else:
            certain = middle
    return *ends(level), 1 - certain


def _paired_numbers(gain: float, moved: np.ndarray, level: float) -> Change:
    from scipy.special import stdtr, stdtrit

    count = len(moved)
    error = float(moved.std(ddof=1)) / math.sqrt(count)
    if error == 0.0:  # the two answer alike
        return Change(gain, gain, gain, 1.0 if gain == 0 else 0.0)
    half = float(stdtrit(count - 1, 0.5 + level / 2)) * error
    return Change(gain, gain - half, gain + half, float(2 * stdtr(count - 1, -abs(gain) / error)))


def _limits(found: Estimate) -> Callable[[float], tuple[float, float]]:
    """The interval of a fraction for any level; what does not depend on the level is found once."""
    if found.bins is not None:
        return _limits_of_calibration(found.value, *found.bins)
    count = len(found.influence)
    variance = float(np.square(found.influence).sum()) / (count * (count - 1))
    # The bias is known to the second order only, so both ends are the farther one of with it and without it.
    rates = {found.value, min(1.0, max(0.0, found.value - found.bias))}
    # Of as many examples a plain proportion would vary as much.
    worths = [
        (rate, min(rate * (1 - rate) / variance if variance > 0 else math.inf, found.effective)) for rate in rates
    ]

    def limits(level: float) -> tuple[float, float]:
        ends = [clopper_pearson(rate * number, number, level) for rate, number in worths]
        return min(found.value, *(low for low, _ in ends)), max(found.value, *(high for _, high in ends))

    return limits


def _resampled(value: float, moved: np.ndarray, level: float) -> tuple[float, float] | None:
    """The studentised bootstrap of a mean (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 12)."""
    count = len(moved)
    error = float(moved.std(ddof=1)) / math.sqrt(count)
    if error == 0.0 or not math.isfinite(error):
        return None
    if count > _RESAMPLED_UP_TO:
        from scipy.special import stdtrit

        half = float(stdtrit(count - 1, 0.5 + level / 2)) * error
        return value - half, value + half
    draws = _draws(count)
    means = draws @ moved
    errors = np.sqrt(np.maximum(draws @ np.square(moved) - np.square(means), 0.0) / (count - 1))
    varied = errors > error / 1000  # a draw of one example again and again says nothing
    low, high = np.quantile(means[varied] / errors[varied], (0.5 - level / 2, 0.5 + level / 2))
    return min(value, value - float(high) * error), max(value, value - float(low) * error)


def _root_of_mean(squares: np.ndarray, level: float) -> tuple[float, float] | None:
    """Of a few examples the largest square is seldom as large as it will be: the upper end is that of the examples with their
    largest added twice, which weighs nothing among many."""
    heavier = np.append(squares, [squares.max()] * 2)
    ends = _resampled(float(squares.mean()), squares - squares.mean(), level)
    above = _resampled(float(heavier.mean()), heavier - heavier.mean(), level)
    if ends is None or above is None:
        return None
    return math.sqrt(max(0.0, ends[0])), math.sqrt(max(ends[1], above[1]))


def _explained(labels: np.ndarray, errors: np.ndarray, level: float) -> tuple[float, float] | None:
    """Each end is also looked for with the example once more that moves R² most in its direction, for the reason above."""
    squares, spread = np.square(errors), np.square(labels - labels.mean())
    if not squares.any():
        return None
    moved = squares / squares.mean() - spread / spread.mean()
    found = []
    for places in ([], [int(moved.argmax())], [int(moved.argmin())]):
        ends = _unexplained(np.append(labels, labels[places]), np.append(errors, errors[places]), level)
        if ends is None:
            return None
        found.append(ends)
    return 1 - max(high for _, high in found), 1 - min(low for low, _ in found)


def _unexplained(labels: np.ndarray, errors: np.ndarray, level: float) -> tuple[float, float] | None:
    """An interval of mean squared error over variance, by the studentised bootstrap of its logarithm; each draw is
    studentised by its own influences, not by those of the examples, because both means are skewed."""
    count = len(labels)
    squares = np.square(errors)
    scale = float(squares.mean() / labels.var())
    labels, squares = (labels - labels.mean()) / labels.std(), squares / squares.mean()
    error = float((squares - np.square(labels)).std(ddof=1)) / math.sqrt(count)
    if error == 0.0 or not math.isfinite(error):
        return None
    if count > _RESAMPLED_UP_TO:
        from scipy.special import stdtrit

        half = float(stdtrit(count - 1, 0.5 + level / 2)) * error
        return scale * math.exp(-half), scale * math.exp(half)
    draws = _draws(count)
    mean, first, second = draws @ squares, draws @ labels, draws @ labels**2
    variance = second - first**2
    varied = variance > 1e-9
    mean, first, second, variance, draws = (values[varied] for values in (mean, first, second, variance, draws))
    # E[(square / mean − (label − first)² / variance)²], whose own mean is 0, multiplied out into moments of the draws.
    both = draws @ (squares * labels**2) - 2 * first * (draws @ (squares * labels)) + first**2 * mean
    fourth = draws @ labels**4 - 4 * first * (draws @ labels**3) + 6 * first**2 * second - 3 * first**4
    spread = draws @ squares**2 / mean**2 - 2 * both / (mean * variance) + fourth / variance**2
    errors_of_draws = np.sqrt(np.maximum(spread, 0.0) / (count - 1))
    said = errors_of_draws > error / 1000  # a draw of one example again and again says nothing
    scores = np.log(mean[said] / variance[said]) / errors_of_draws[said]
    low, high = np.quantile(scores, (0.5 - level / 2, 0.5 + level / 2))
    return scale * math.exp(min(0.0, -float(high) * error)), scale * math.exp(max(0.0, -float(low) * error))


@functools.lru_cache(maxsize=4)  # every metric of a slice takes the same, and some one or two more
def _draws(count: int) -> np.ndarray:
    """Shares of the examples in as many draws with replacement [draws, count]."""
    places = np.random.default_rng(_SEED).integers(count, size=(_NUM_DRAWS, count))
    places += np.arange(_NUM_DRAWS)[:, np.newaxis] * count
    return np.bincount(places.ravel(), minlength=_NUM_DRAWS * count).reshape(_NUM_DRAWS, count) / count


def _limits_of_calibration(
    value: float, counts: np.ndarray, hits: np.ndarray
) -> Callable[[float], tuple[float, float]]:
    """The error of each bin is off by at most the noise of its right answers; the noise is drawn by counts.

    Since |‖a‖ − ‖b‖| ≤ ‖a − b‖, this holds at least as often as it says. Bins are taken to be as wide as they are.
    """
    counts, hits = counts[counts > 0], hits[counts > 0]
    rates = (hits + 1) / (counts + 2)  # a bin without a mistake has one in truth
    drawn = np.random.default_rng(_SEED).binomial(counts.astype(np.int64), rates, (_NUM_DRAWS, len(counts)))
    noise = np.abs(drawn - counts * rates).sum(axis=1) / counts.sum()

    def limits(level: float) -> tuple[float, float]:
        half = float(np.quantile(noise, level))
        return max(0.0, value - half), min(1.0, value + half)

    return limits


def _normal_quantile(level: float) -> float:
    return NormalDist().inv_cdf(0.5 + level / 2)
