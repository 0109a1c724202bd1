"""Which days of data a run takes: the last so many whole days that have had time to arrive.

    days_of(DataWindow(days=2), datetime(2027, 1, 29, 3, tzinfo=UTC))      # ("2027-01-27", "2027-01-28")
    settled(config, now)                                                   # the data section with its last day filled in

A day is one of UTC and stands in the files' names, where `data.path` says `{date}`. The last day is found once, in the first
task, and goes on from there as a setting: so every task means the same days, and a run can be repeated later.
"""

import fnmatch
from datetime import UTC, date, datetime, timedelta

from trainer.config import DataConfig, DataWindow

DATE = "{date}"


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
