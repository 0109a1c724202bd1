"""Five-field cron in a time zone: the moments it means, and the six fields in UTC that Kubeflow's server takes.

    cron = parse_cron("30 2 * * sun")
    cron.moments(after, zone_of("Europe/Berlin"))      # what is meant, as UTC datetimes, without end
    server_cron(cron, zone, at)                        # "0 30 1 * * 0": what the server gets at that offset from UTC
    preview(cron, zone, now, count=5)                  # what the server will do, beside what is meant

A time that the clocks skip is meant an hour later (02:30 → 03:30); one shown twice is meant once, the first time.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from trainer.errors import BadInput

_MONTHS = {
    "jan": 1, "feb": 2, "mar": 3, "apr": 4, "may": 5, "jun": 6,
    "jul": 7, "aug": 8, "sep": 9, "oct": 10, "nov": 11, "dec": 12,
}  # fmt: skip
_WEEKDAYS = {"sun": 0, "mon": 1, "tue": 2, "wed": 3, "thu": 4, "fri": 5, "sat": 6}
_FIELDS = (
    ("minute", 0, 59, {}), ("hour", 0, 23, {}), ("day of the month", 1, 31, {}),
    ("month", 1, 12, _MONTHS), ("day of the week", 0, 7, _WEEKDAYS),
)  # fmt: skip
_DAYS_WITHOUT_END = 366 * 9  # a 29 February can be eight years away
_SHORTCUTS = {
    "@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *",
}  # fmt: skip


@dataclass(frozen=True)
class Cron:
    """Which minutes of which days; None for a day, month or weekday means every one."""

    minutes: tuple[int, ...]
    """0 to 59."""
    hours: tuple[int, ...]
    """0 to 23."""
    days: tuple[int, ...] | None
    """Days of the month, 1 to 31."""
    months: tuple[int, ...] | None
    """1 to 12."""
    weekdays: tuple[int, ...] | None
    """0 (Sunday) to 6. Where days are given too, either suffices, as in every cron."""

    def on(self, day: date) -> bool:
        """Whether anything happens on a day of its own zone."""
        if self.months is not None and day.month not in self.months:
            return False
        in_month = self.days is not None and day.day in self.days
        in_week = self.weekdays is not None and day.isoweekday() % 7 in self.weekdays
        if self.days is None and self.weekdays is None:
            return True
        return in_month or in_week

    def moments(self, after: datetime, zone: ZoneInfo) -> Iterator[datetime]:
        """The moments after one, in order, in UTC; ends where nothing comes for nine years."""
        day = after.astimezone(zone).date() - timedelta(days=1)
        silent, last = 0, after.astimezone(UTC)
        while silent < _DAYS_WITHOUT_END:
            silent += 1
            for moment in self._of_day(day, zone):
                if moment > last:
                    yield moment
                    last, silent = moment, 0
            day += timedelta(days=1)

    def last_before(self, moment: datetime, zone: ZoneInfo) -> datetime | None:
        """The newest moment that is not after this one, in UTC; None where there was none for nine years."""
        day = moment.astimezone(zone).date() + timedelta(days=1)
        for _ in range(_DAYS_WITHOUT_END):
            passed = [one for one in self._of_day(day, zone) if one <= moment]
            if passed:
                return passed[-1]
            day -= timedelta(days=1)
        return None

    def _of_day(self, day: date, zone: ZoneInfo) -> list[datetime]:
        if not self.on(day):
            return []
        local = (datetime.combine(day, time(hour, minute), zone) for hour in self.hours for minute in self.minutes)
        return sorted({moment.astimezone(UTC) for moment in local})


def parse_cron(text: str) -> Cron:
    """A cron expression of five fields, with names, ranges, lists, steps and `@daily` and its kind.

    Raises:
        BadInput: It cannot be read, or nothing would ever happen.
    """
    words = _SHORTCUTS.get(text.strip().lower(), text).split()
    if len(words) == 6:
        raise BadInput("has six fields: leave out the seconds, the server's form is made from five")
    if len(words) != 5:
        raise BadInput(f"must have five fields (minute hour day month weekday), and has {len(words)}")
    minutes, hours, days, months, weekdays = (_values(word, *field) for word, field in zip(words, _FIELDS, strict=True))
    if not {words[2], words[4]} & {"*", "?"} and (words[2] + words[4]).count("*"):
        raise BadInput("crons disagree about */n in one of the two day fields when both are given; write the days out")
    cron = Cron(
        minutes,
        hours,
        None if words[2] in ("*", "?") else days,
        None if words[3] == "*" else months,
        None if words[4] in ("*", "?") else tuple(sorted({day % 7 for day in weekdays})),
    )
    if next(cron.moments(datetime(2027, 1, 1, tzinfo=UTC), ZoneInfo("UTC")), None) is None:
        raise BadInput("names days that no calendar has")
    return cron


def zone_of(name: str) -> ZoneInfo:
    """The time zone of a name such as `Europe/Berlin`.

    Raises:
        BadInput: There is none of that name.
    """
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise BadInput("is no time zone; take a name such as UTC or Europe/Berlin") from None


def server_cron(cron: Cron, zone: ZoneInfo, at: datetime) -> str:
    """The six fields (seconds first) in UTC that mean the same while the zone's offset is that of `at`.

    Raises:
        BadInput: One expression in UTC cannot say it.
    """
    offset = at.astimezone(zone).utcoffset() or timedelta()
    shift = -round(offset.total_seconds() / 60)
    shifted = [divmod(hour * 60 + minute + shift, 24 * 60) for hour in cron.hours for minute in cron.minutes]
    times = sorted({minute_of_day for _, minute_of_day in shifted})
    minutes, hours = sorted({moment % 60 for moment in times}), sorted({moment // 60 for moment in times})
    if len(times) != len(minutes) * len(hours):
        raise BadInput(f"the offset {_offset(offset)} spreads its minutes unevenly; make a schedule for each minute")
    on_days = cron.days is not None or cron.months is not None or cron.weekdays is not None
    turns = {day for day, _ in shifted}
    if on_days and len(turns) > 1:
        raise BadInput("in UTC its hours fall on two different days; make a schedule for each of them")
    turn = turns.pop() if on_days else 0
    if turn and cron.months is not None:
        raise BadInput(
            "in UTC it falls on the day before or after, which can be another month; take an hour nearer noon"
        )
    if turn and cron.days is not None and not all(1 <= day + turn <= 28 for day in cron.days):
        raise BadInput(
            f"in UTC it falls on the day {'before' if turn < 0 else 'after'}, which months of different lengths"
            " do not allow; take an hour nearer noon or other days"
        )
    days = None if cron.days is None else [day + turn for day in cron.days]
    weekdays = None if cron.weekdays is None else sorted((day + turn) % 7 for day in cron.weekdays)
    return " ".join(
        ("0", _written(minutes, 60), _written(hours, 24), _written(days), _written(cron.months), _written(weekdays))
    )


def server_moments(expression: str, after: datetime) -> Iterator[datetime]:
    """The moments at which the server acts on six fields in UTC."""
    return parse_server_cron(expression).moments(after, ZoneInfo("UTC"))


def parse_server_cron(expression: str) -> Cron:
    """Six fields, of which the first says second 0."""
    return parse_cron(expression.partition(" ")[2])


@dataclass(frozen=True)
class Moment:
    """One coming run."""

    at: datetime
    """When the server starts it, in UTC."""
    late_minutes: int = 0
    """How much later than meant, because the zone's clocks were changed since; negative for earlier."""


def preview(cron: Cron, zone: ZoneInfo, now: datetime, count: int) -> list[Moment]:
    """The next moments of the server, which keeps the offset of the first, and how far they are from what is meant."""
    first = next(cron.moments(now, zone), None)
    if first is None:
        return []
    kept = first.astimezone(zone).utcoffset() or timedelta()
    moments = list(itertools.islice(server_moments(server_cron(cron, zone, first), now), count))
    meant = set(itertools.takewhile(lambda moment: moment <= moments[-1], cron.moments(now, zone)))
    return [
        Moment(at, 0 if at in meant else round(((at.astimezone(zone).utcoffset() or kept) - kept).total_seconds() / 60))
        for at in moments
    ]


def _values(word: str, name: str, low: int, high: int, names: dict[str, int]) -> tuple[int, ...]:
    found: set[int] = set()
    for part in word.lower().split(","):
        match = re.fullmatch(r"(?P<all>[*?])|(?P<from>\w+)(-(?P<to>\w+))?", part.partition("/")[0])
        step_text = part.partition("/")[2] if "/" in part else "1"
        if not match or not step_text.isdecimal() or int(step_text) < 1:
            raise BadInput(f"{part!r} cannot be read as {name}")
        if match["all"]:
            first, last = low, high
        else:
            first = _number(match["from"], name, low, high, names)
            last = _number(match["to"], name, low, high, names) if match["to"] else (high if "/" in part else first)
            if name == "day of the week" and match["to"] and last == 0 < first:  # fri-sun
                last = 7
        if first > last:
            raise BadInput(f"{part!r} ends before it begins")
        found.update(range(first, last + 1, int(step_text)))
    return tuple(sorted(found))


def _number(text: str, name: str, low: int, high: int, names: dict[str, int]) -> int:
    number = int(text) if text.isdecimal() else names.get(text)
    if number is None or not low <= number <= high:
        raise BadInput(f"{text!r} is no {name} ({low} to {high})")
    return number


def _written(values: "list[int] | tuple[int, ...] | None", everything: int | None = None) -> str:
    return "*" if values is None or len(values) == everything else ",".join(map(str, values))


def _offset(offset: timedelta) -> str:
    minutes = round(offset.total_seconds() / 60)
    return f"UTC{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"
