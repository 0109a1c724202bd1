"""Cron in a time zone and its translation for the server."""

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.cron import parse_cron, preview, server_cron, server_moments, zone_of
from trainer.errors import BadInput

BERLIN, SYDNEY, UTC_ZONE = ZoneInfo("Europe/Berlin"), ZoneInfo("Australia/Sydney"), ZoneInfo("UTC")
KATHMANDU, LORD_HOWE = ZoneInfo("Asia/Kathmandu"), ZoneInfo("Australia/Lord_Howe")


def moments(text: str, zone: ZoneInfo, after: datetime, count: int) -> list[str]:
    found = itertools.islice(parse_cron(text).moments(after, zone), count)
    return [moment.astimezone(zone).strftime("%a %Y-%m-%d %H:%M") for moment in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 3 * * mon", ["Mon 2027-03-01 03:00", "Mon 2027-03-08 03:00"]),
        ("*/20 8-9 * * *", ["Mon 2027-03-01 08:00", "Mon 2027-03-01 08:20"]),
        ("0 0 29 2 *", ["Tue 2028-02-29 00:00", "Sun 2032-02-29 00:00"]),
        ("0 0 13 * fri", ["Fri 2027-03-05 00:00", "Fri 2027-03-12 00:00"]),
        ("0 0 * * fri-sun", ["Fri 2027-03-05 00:00", "Sat 2027-03-06 00:00"]),
        ("0 0 * * 7", ["Sun 2027-03-07 00:00", "Sun 2027-03-14 00:00"]),
        ("0 0 1 jan,jul *", ["Thu 2027-07-01 00:00", "Sat 2028-01-01 00:00"]),
        ("@monthly", ["Thu 2027-04-01 00:00", "Sat 2027-05-01 00:00"]),
    ],
)
def test_the_five_fields_mean_what_every_cron_means(text: str, expected: list[str]) -> None:
    assert moments(text, UTC_ZONE, datetime(2027, 3, 1, tzinfo=UTC), 2) == expected


def test_either_day_field_suffices_when_both_are_given() -> None:
    found = moments("0 0 13 * fri", UTC_ZONE, datetime(2027, 3, 12, tzinfo=UTC), 2)
    assert found == ["Sat 2027-03-13 00:00", "Fri 2027-03-19 00:00"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0 3 * *", "must have five fields"),
        ("0 0 3 * * 1", "leave out the seconds"),
        ("60 3 * * *", r"'60' is no minute \(0 to 59\)"),
        ("0 3 * * someday", "'someday' is no day of the week"),
        ("0 9-8 * * *", "ends before it begins"),
        ("0 */0 * * *", "cannot be read as hour"),
        ("0 0 31 2 *", "days that no calendar has"),
        ("0 0 */2 * mon", "write the days out"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_rule(text: str, rule: str) -> None:
    with pytest.raises(BadInput, match=rule):
        parse_cron(text)


def test_a_time_the_clocks_skip_comes_an_hour_later_and_one_shown_twice_comes_once() -> None:
    spring = moments("30 2 * * *", BERLIN, datetime(2027, 3, 27, 12, tzinfo=UTC), 2)
    assert spring == ["Sun 2027-03-28 03:30", "Mon 2027-03-29 02:30"]
    autumn = list(itertools.islice(parse_cron("30 2 * * *").moments(datetime(2027, 10, 30, 12, tzinfo=UTC), BERLIN), 2))
    assert autumn == [datetime(2027, 10, 31, 0, 30, tzinfo=UTC), datetime(2027, 11, 1, 1, 30, tzinfo=UTC)]
    southern = moments("30 2 * * *", SYDNEY, datetime(2027, 10, 2, 0, tzinfo=UTC), 2)
    assert southern == ["Sun 2027-10-03 03:30", "Mon 2027-10-04 02:30"]


@pytest.mark.parametrize(
    ("text", "zone", "expected"),
    [
        ("0 3 * * mon", UTC_ZONE, "0 0 3 * * 1"),
        ("0 3 * * mon", BERLIN, "0 0 2 * * 1"),
        ("30 0 * * mon", BERLIN, "0 30 23 * * 0"),
        ("30 0 * * sun", BERLIN, "0 30 23 * * 6"),
        ("0 0,12 * * *", BERLIN, "0 0 11,23 * * *"),
        ("0 6 * * mon-fri", SYDNEY, "0 0 19 * * 0,1,2,3,4"),
        ("0 8 * * *", KATHMANDU, "0 15 2 * * *"),
        ("*/15 * * * *", KATHMANDU, "0 0,15,30,45 * * * *"),
        ("0 23 20 * *", ZoneInfo("America/New_York"), "0 0 4 21 * *"),
    ],
)
def test_the_server_gets_six_fields_in_utc(text: str, zone: ZoneInfo, expected: str) -> None:
    assert server_cron(parse_cron(text), zone, datetime(2027, 1, 15, tzinfo=UTC)) == expected


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0 0 1 * *", "months of different lengths"),
        ("0 0 * jun *", "another month"),
        ("0 0,12 * * mon", "a schedule for each"),
    ],
)
def test_what_one_expression_in_utc_cannot_say_is_refused(text: str, rule: str) -> None:
    with pytest.raises(BadInput, match=rule):
        server_cron(parse_cron(text), BERLIN, datetime(2027, 1, 15, tzinfo=UTC))


@given(
    minute=st.integers(0, 59),
    hours=st.sets(st.integers(0, 23), min_size=1, max_size=3),
    weekdays=st.none() | st.sets(st.integers(0, 6), min_size=1, max_size=6),
    zone=st.sampled_from(
        ["UTC", "Europe/Berlin", "America/New_York", "Australia/Sydney", "Asia/Kathmandu", "Pacific/Kiritimati"]
    ),
    day=st.integers(0, 364),
)
@settings(max_examples=120, deadline=None)
def test_while_the_offset_stands_the_server_acts_at_the_very_moments_that_are_meant(
    minute: int, hours: set[int], weekdays: set[int] | None, zone: str, day: int
) -> None:
    days = "*" if weekdays is None else ",".join(map(str, sorted(weekdays)))
    cron, place = parse_cron(f"{minute} {','.join(map(str, sorted(hours)))} * * {days}"), zone_of(zone)
    now = datetime(2027, 1, 1, 12, tzinfo=UTC) + timedelta(days=day)
    try:
        expression = server_cron(cron, place, now)
    except BadInput:
        assert weekdays is not None  # only a day field can make it impossible here
        return
    assert expression.split()[0] == "0"
    assert len(expression.split()) == 6
    later = now + timedelta(days=14)
    if later.astimezone(place).utcoffset() != now.astimezone(place).utcoffset():
        return
    meant = list(itertools.takewhile(lambda moment: moment <= later, cron.moments(now, place)))
    done = list(itertools.takewhile(lambda moment: moment <= later, server_moments(expression, now)))
    assert done == meant


@given(st.sampled_from([BERLIN, SYDNEY, LORD_HOWE, KATHMANDU]), st.integers(0, 23), st.integers(0, 59))
@settings(max_examples=60, deadline=None)
def test_over_a_year_every_day_has_its_moment_once_whatever_the_clocks_do(
    zone: ZoneInfo, hour: int, minute: int
) -> None:
    start = datetime(2027, 1, 1, tzinfo=zone)
    found = itertools.islice(parse_cron(f"{minute} {hour} * * *").moments(start - timedelta(seconds=1), zone), 365)
    days = [moment.astimezone(zone).date() for moment in found]
    assert len(set(days)) == 365


@pytest.mark.parametrize(
    ("zone", "now", "late"),
    [(BERLIN, datetime(2027, 3, 26, tzinfo=UTC), 60), (SYDNEY, datetime(2027, 4, 2, tzinfo=UTC), -60)],
)
def test_the_preview_says_where_changed_clocks_make_the_server_late_or_early(zone, now: datetime, late: int) -> None:
    found = preview(parse_cron("0 12 * * *"), zone, now, 6)
    assert [moment.late_minutes for moment in found][:1] == [0]
    assert found[-1].late_minutes == late
    assert found[-1].at.astimezone(zone).hour == 12 + late // 60
    again = preview(parse_cron("0 12 * * *"), zone, now + timedelta(days=8), 6)
    assert {moment.late_minutes for moment in again} == {0}
