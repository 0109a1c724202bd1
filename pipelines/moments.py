"""When the schedules of a configuration run, as the file says it; no server is asked.

translated("weekly", schedule, now)         # "0 0 2 * * 1", the server's six fields in UTC
coincidences(config, now)                   # a sentence for each two that start the same run at one moment
"""

import itertools
from datetime import datetime, timedelta
from typing import Any

from pipelines.config import Config
from pipelines.cron import parse_cron, server_cron, zone_of
from pipelines.operation import ScheduleConfig
from trainer.errors import BadInput

_MOST_MOMENTS = 20_000
"""That are compared of a schedule: two weeks of every minute, and longer than a year of every hour."""


def translated(name: str, schedule: ScheduleConfig, now: datetime) -> str:
    """The six fields that the server gets: the offset from UTC is that of the next moment.

    Raises:
        BadInput: One expression in UTC cannot say it, or nothing comes any more.
    """
    cron, zone = parse_cron(schedule.cron), zone_of(schedule.timezone)
    first = next(cron.moments(max(now, schedule.start_time or now), zone), None)
    if first is None:
        raise BadInput(f"schedules.{name}.cron = {schedule.cron}: never comes")
    try:
        return server_cron(cron, zone, first)
    except BadInput as error:
        raise BadInput(f"schedules.{name}.cron = {schedule.cron} in {schedule.timezone}: {error}") from None


def coincidences(config: Config, now: datetime) -> list[str]:
    """A sentence for each two enabled schedules that start the same run at the same moment within a year.

    They may: the second then trains what the first trains, on nodes that are paid for twice.
    """
    enabled = {name: one for name, one in config.schedules.items() if one.enabled}
    said = []
    for (name, one), (other, two) in itertools.combinations(enabled.items(), 2):
        if one.version != two.version or _settings(config, name) != _settings(config, other):
            continue
        if (moment := _first_common(one, two, now)) is None:
            continue
        local = dict.fromkeys(
            f"{moment.astimezone(zone_of(z)):%a %Y-%m-%d %H:%M %Z}" for z in (one.timezone, two.timezone)
        )
        said.append(
            f"{name} and {other} both run at {', '.join(local)} ({moment:%Y-%m-%d %H:%M} UTC) with the same settings, so"
            " one of the two runs is for nothing; change a cron, or give one of them overrides"
        )
    return said


def _settings(config: Config, name: str) -> dict[str, Any]:
    return config.scheduled(name).model_dump(exclude={"schedules"})


def _first_common(one: ScheduleConfig, two: ScheduleConfig, now: datetime) -> datetime | None:
    """The first moment of both, in UTC; those that the file means, which the server keeps while it is applied."""
    begin = max([now, *(moment for moment in (one.start_time, two.start_time) if moment is not None)])
    end = min([begin + timedelta(days=366), *(moment for moment in (one.end_time, two.end_time) if moment is not None)])
    left, right = (
        itertools.islice(
            parse_cron(each.cron).moments(begin - timedelta(minutes=1), zone_of(each.timezone)), _MOST_MOMENTS
        )
        for each in (one, two)
    )
    first, second = next(left, None), next(right, None)
    while first and second and max(first, second) <= end:
        if first == second:
            return first
        if first < second:
            first = next(left, None)
        else:
            second = next(right, None)
    return None
