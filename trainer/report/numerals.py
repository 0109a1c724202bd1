"""How numbers and names are written: one way on the whole page, whatever is missing, infinite or not a number."""

from __future__ import annotations

import math

MISSING = "–"
_MINUS = "\N{MINUS SIGN}"
_THIN = "\N{NARROW NO-BREAK SPACE}"

# The part after the last underscore decides, so that `validation_loss` and `macro_mae` are known too.
_LOWER_IS_BETTER = frozenset({"loss", "error", "brier", "ece", "rmse", "mse", "mae", "mape", "pinball", "latency"})
_SPELLED = {
    "auc": "AUC",
    "roc": "ROC",
    "pr": "PR",
    "ece": "ECE",
    "rmse": "RMSE",
    "mse": "MSE",
    "mae": "MAE",
    "f1": "F1",
    "r2": "R²",
}


def finite(value: object) -> float | None:
    """Returns `value` as a float, or None when it is missing, not a number, NaN or infinite."""
    if value is None or isinstance(value, (bool, str, bytes)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def decimal(value: object, places: int = 4) -> str:
    """Returns a number with `places` decimals, `–` for a missing one, `NaN`, `∞` or `−∞` for what is not finite."""
    number = finite(value)
    if number is None:
        return _not_finite(value)
    if (number != 0 and abs(number) < 10**-places / 2) or abs(number) >= 1e9:
        mantissa, exponent = f"{number:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", _MINUS)
    text = f"{number:,.{places if abs(number) < 1000 else 1}f}".replace(",", _THIN)
    return text.replace("-", _MINUS) if float(f"{number:.{places}f}") else text.lstrip("-")


def signed(value: float, places: int = 4) -> str:
    """Returns a difference with its sign; a zero has none."""
    text = decimal(value, places)
    return f"+{text}" if finite(value) and value > 0 and text.strip("0.") else text


def count(value: object) -> str:
    """Returns a whole number with its thousands apart."""
    number = finite(value)
    return _not_finite(value) if number is None else f"{round(number):,}".replace(",", _THIN).replace("-", _MINUS)


def percent(value: object) -> str:
    """Returns a fraction in [0, 1] as a percentage; a fraction that is not whole is never rounded to 0 or 100."""
    number = finite(value)
    if number is None:
        return _not_finite(value)
    if 0.9995 <= number < 1:
        return f"over 99.9{_THIN}%"
    if 0 < number < 0.0005:
        return f"under 0.1{_THIN}%"
    return f"{100 * number:.1f}{_THIN}%"


def confidence(level: float) -> str:
    """Returns how often an interval holds the true value: `95 %`."""
    return f"{round(100 * level, 6):g}{_THIN}%"


def plural(number: object, one: str, many: str | None = None) -> str:
    """Returns `1 example` or `3 examples`."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def metric_name(metric: str, top_k: object = None) -> str:
    """Returns a metric's name for people: `macro_f1` is `Macro F1`, and `top_k_accuracy` of 5 `Top 5 accuracy`."""
    if metric == "top_k_accuracy" and isinstance(top_k, int):
        return f"Top {top_k} accuracy"
    words = [_SPELLED.get(word, word) for word in str(metric).replace("_", " ").split()]
    text = " ".join(words)
    return text[:1].upper() + text[1:]


def lower_is_better(metric: str) -> bool:
    """Tells whether a smaller value of this metric is the better one."""
    name = str(metric).lower()
    return name.rsplit("_", 1)[-1] in _LOWER_IS_BETTER or name.startswith("pinball_")  # pinball_0.9


def leading_metric(evaluation: dict, verdict: dict) -> str | None:
    """Returns the metric a reader asks for first: accuracy, else the first judged one, else the first measured one."""
    metrics = evaluation.get("metrics") or {}
    judged = [rule.get("metric") for rule in verdict.get("rules") or []]
    return next((name for name in ["accuracy", *judged, *metrics] if name in metrics), None)


def _not_finite(value: object) -> str:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else f"{_MINUS}∞"
    return MISSING
