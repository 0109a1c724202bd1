"""Which days of data a run takes: the last so many whole days that have had time to arrive.

    days_of(DataWindow(days=2), datetime(2027, 1, 29, 3, tzinfo=UTC))      # ("2027-01-27", "2027-01-28")
    settled(config, now)                                                   # the data section with its last day filled in

A day is one of UTC. It stands in the files' names, where `data.path` says `{date}`, or in a column of theirs. The last day is
found once, in the first task, and goes on from there as a setting: so every task means the same days, and a run can be
repeated later.
"""

import fnmatch
from datetime import UTC, date, datetime, timedelta
from typing import Any

from trainer.config import DataConfig, DataWindow

DATE = "{date}"


def moment_of(scheduled: str) -> datetime | None:
    """The moment that a server gave for one; None where it is empty, the placeholder itself, or before computers."""
    try:
        found = datetime.fromisoformat(scheduled)
    except ValueError:
        return None
    return found if found.tzinfo is not None and found.year > 2000 else None


def last_day(window: DataWindow, as_of: datetime) -> date:
    """The last whole day that ended at least `delay_hours` before a moment."""
    return (as_of.astimezone(UTC) - timedelta(hours=window.delay_hours)).date() - timedelta(days=1)


def days_of(window: DataWindow, as_of: datetime) -> tuple[str, ...]:
    """The days, oldest first, as `2027-01-28`; `until` comes before the moment."""
    last = date.fromisoformat(window.until) if window.until is not None else last_day(window, as_of)
    return tuple((last - timedelta(days=back)).isoformat() for back in reversed(range(window.days)))


def settled(config: DataConfig, as_of: datetime) -> DataConfig:
    """The section with the window's last day filled in; the same where there is no window."""
    if config.window is None or config.window.until is not None:
        return config
    window = config.window.model_copy(update={"until": days_of(config.window, as_of)[-1]})
    return config.model_copy(update={"window": window})


def is_wanted(name: str, pattern: str, window: DataWindow | None) -> bool:
    """Whether a file's name fits a pattern, on one of the window's days where the pattern has a `{date}`."""
    if window is None:
        return fnmatch.fnmatchcase(name, pattern)
    days = days_of(window, datetime.now(UTC))
    return any(fnmatch.fnmatchcase(name, pattern.replace(DATE, day)) for day in days)


class Days:
    """Which rows have their day in a window, by a column.

    Args:
        config: The data section. Where it has no window with a column, every row is wanted.
    """

    def __init__(self, config: DataConfig) -> None:
        window = config.window
        self.column = window.column if window else None
        self._days = days_of(window, datetime.now(UTC)) if window and self.column else ()

    def wants(self, value: Any) -> bool:
        """Whether a value of the column lies in the window.

        Raises:
            ValueError: It is no day.
        """
        return self._days[0] <= self._day(value) <= self._days[-1]

    def identity(self) -> dict[str, Any]:
        """What the rows that are wanted depend on besides the files, as plain data."""
        return {"window": [self.column, self._days[0], self._days[-1]]} if self.column else {}

    def _day(self, value: Any) -> str:
        if value is None or value == "":
            raise ValueError(f"{self.column}, the window's day, is missing")
        try:
            return _day_of(value.decode() if isinstance(value, bytes) else value)
        except (TypeError, ValueError, OverflowError, OSError):
            raise ValueError(f"{self.column} = {value!r} is no day, such as 2027-01-31") from None


def _day_of(value: Any) -> str:
    text = str(value)
    is_seconds = text.isdecimal() and len(text) != 8  # 20270131 is a day, also where it is a number
    if isinstance(value, (str, int)) and not is_seconds:
        value = datetime.fromisoformat(text)
    if isinstance(value, datetime):  # which is a date, too
        return (value if value.tzinfo is None else value.astimezone(UTC)).date().isoformat()
    if isinstance(value, date):
        return value.isoformat()
    return datetime.fromtimestamp(float(value), UTC).date().isoformat()
