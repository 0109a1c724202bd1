"""Which days of data a run takes, from the moment it begins to the files that are prepared."""

import itertools
import json
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kfp import dsl

from components.fingerprint_data import fingerprint_data
from components.prepare_data import prepare_data
from pipelines.cli import main
from trainer import tasks
from trainer.config import DataConfig, DataWindow, parse
from trainer.data.frames import FrameWriter, read_frames
from trainer.data.manifest import Feature, read_manifest
from trainer.data.prepare import prepare
from trainer.data.records import Encoder, decode, finish, label_entry
from trainer.data.window import days_of, last_day, settled
from trainer.errors import BadInput


@pytest.fixture
def daily(tmp_path):
    """A table a day for ten days, ten rows each, of two classes; gives the data section's settings."""
    for day in range(1, 11):
        folder = tmp_path / "events" / f"day=2027-01-{day:02d}"
        folder.mkdir(parents=True)
        rows = "".join(f"{day * 10 + row},{'even' if row % 2 == 0 else 'odd'}\n" for row in range(10))
        (folder / "part.csv").write_text(f"x,label\n{rows}")
    return {
        "source": "csv", "path": f"{tmp_path}/events/day={{date}}/*.csv", "label_key": "label",
        "splits": {"train": "60%", "validation": "20%", "test": "20%"},
    }  # fmt: skip


def section(daily: dict, **window) -> DataConfig:
    return parse(DataConfig, {**daily, "window": window}, path="data")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("delay_hours", "as_of", "expected"),
    [
        (0, "2027-01-29T00:00:00Z", "2027-01-28"),
        (0, "2027-01-28T23:59:59Z", "2027-01-27"),
        (6, "2027-01-29T05:59:00Z", "2027-01-27"),
        (6, "2027-01-29T06:00:00Z", "2027-01-28"),
        (0, "2027-03-01T12:00:00Z", "2027-02-28"),
        (0, "2028-03-01T12:00:00Z", "2028-02-29"),
        (0, "2027-01-29T01:00:00+02:00", "2027-01-27"),
    ],
)
def test_the_last_day_is_the_newest_whole_one_that_had_time_to_arrive(delay_hours, as_of, expected):
    assert last_day(DataWindow(days=3, delay_hours=delay_hours), at(as_of)) == date.fromisoformat(expected)


@given(
    st.integers(1, 60), st.integers(0, 100),
    st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1)), st.integers(-12, 14),
)  # fmt: skip
@settings(deadline=None)
def test_a_window_is_so_many_days_in_a_row_and_none_that_is_still_arriving(days, delay, moment, offset):
    as_of = moment.replace(tzinfo=timezone(timedelta(hours=offset)))
    found = [date.fromisoformat(day) for day in days_of(DataWindow(days=days, delay_hours=delay), as_of)]
    assert len(found) == days
    assert all(after - before == timedelta(days=1) for before, after in itertools.pairwise(found))
    end = datetime.combine(found[-1] + timedelta(days=1), datetime.min.time(), UTC)
    assert timedelta(hours=delay) <= as_of - end < timedelta(hours=delay + 24)


def prepared(daily: dict, tmp_path: Path, name: str, **window):
    config = section(daily, **window).to_json()
    found = fingerprint_data.python_func(config, 7, "/nowhere", "code", "", "")
    examples = dsl.Dataset(uri=str(tmp_path / name))
    prepare_data.python_func(config, 7, str(tmp_path / "root"), "code", found, examples)
    return json.loads(found), read_manifest(Path(examples.path))


def test_exactly_the_days_of_the_window_are_prepared_and_repeating_it_gives_the_same_data(daily, tmp_path):
    found, manifest = prepared(daily, tmp_path, "one", days=4, until="2027-01-08")
    assert found["until"] == "2027-01-08"
    assert sum(split.num_examples for split in manifest.splits.values()) == 40
    again, same = prepared(daily, tmp_path, "two", days=4, until="2027-01-08")
    assert (again, same.digest) == (found, manifest.digest)
    other, later = prepared(daily, tmp_path, "three", days=4, until="2027-01-09")
    assert other["digest"] != found["digest"]
    assert later.digest != manifest.digest


def test_the_window_is_settled_in_the_first_task_and_kept_by_the_next(daily, tmp_path, monkeypatch):
    class Clock(datetime):
        moment = at("2027-01-06T00:30:00Z")

        @classmethod
        def now(cls, zone=None):
            return cls.moment

    monkeypatch.setattr(tasks, "datetime", Clock)
    config = section(daily, days=2).to_json()
    found = fingerprint_data.python_func(config, 7, "/nowhere", "code", "", "")
    assert json.loads(found)["until"] == "2027-01-05"
    Clock.moment = at("2027-01-08T00:30:00Z")  # the next task begins days later, and means the same days
    examples = dsl.Dataset(uri=str(tmp_path / "examples"))
    prepare_data.python_func(config, 7, str(tmp_path / "root"), "code", found, examples)
    assert sum(split.num_examples for split in read_manifest(Path(examples.path)).splits.values()) == 20


def test_a_day_that_arrives_late_changes_the_fingerprint_and_one_outside_does_not(daily, tmp_path):
    before = prepared(daily, tmp_path, "one", days=3, until="2027-01-05")[0]
    (tmp_path / "events" / "day=2027-01-09" / "part.csv").write_text("x,label\n1,even\n")
    assert prepared(daily, tmp_path, "two", days=3, until="2027-01-05")[0] == before
    (tmp_path / "events" / "day=2027-01-04" / "more.csv").write_text("x,label\n1,even\n2,odd\n")
    assert prepared(daily, tmp_path, "three", days=3, until="2027-01-05")[0] != before


def test_a_window_that_is_given_its_last_day_is_left_alone(daily):
    config = section(daily, days=2, until="2027-01-03")
    assert settled(config, at("2030-01-01T00:00:00Z")) is config


def test_as_of_takes_the_window_as_it_was(daily, tmp_path, configuration, monkeypatch):
    from pipelines.config import load_config_as_of

    file = configuration(json.dumps({"name": "tiny", "data": {**daily, "window": {"days": 3, "delay_hours": 6}}}))
    config = load_config_as_of(file, [], "2027-01-07T08:00:00+01:00")
    assert config.data.window == DataWindow(days=3, delay_hours=6, until="2027-01-06")


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"window": None}, [], "has a {date}, and data.window does not say which days"),
        ({"path": "/x/*.csv"}, [], "needs {date} in data.path, or a column"),
        ({"window": {"days": 1, "column": "label"}}, [], 'data.window.column = "label": is the label or the weight'),
        ({"window": {"days": 1, "column": ""}}, [], "data.window.column"),
        ({"window": {"days": 0}}, [], "data.window.days = 0: must be at least 1"),
        ({"window": {"days": 1, "until": "yesterday"}}, [], "must be a day such as 2027-01-31"),
        ({"window": {"days": 1, "until": "2027-02-30"}}, [], "is no day"),
        ({}, ["--as-of", "2027-01-01"], "--as-of = 2027-01-01: must say its time zone"),
        ({}, ["--as-of", "soon"], "--as-of = soon: must be a date and time"),
    ],
)
def test_a_window_that_cannot_work_is_refused(daily, configuration, tmp_path, capsys, change, words, message):
    data = {**daily, "window": {"days": 2}, **change}
    file = configuration(json.dumps({"name": "tiny", "data": data}))
    assert main(["run", str(file), "--root", str(tmp_path / "root"), *words]) == 2
    assert message in capsys.readouterr().err


def test_check_counts_the_files_of_the_window(daily, configuration, capsys):
    data = {**daily, "window": {"days": 4, "until": "2027-01-12"}}
    main(["check", str(configuration(json.dumps({"name": "tiny", "data": data})))])
    assert "passed  dataset: " in (out := capsys.readouterr().out)
    assert "2 files of 2027-01-09 to 2027-01-12" in out


SPLITS = {"train": "60%", "validation": "20%", "test": "20%"}


def rows_of_ten_days(day_of):
    """Ten rows a day, the newest first, each with what `day_of` makes of its moment."""
    moments = [datetime(2027, 1, day, hour, tzinfo=UTC) for day in range(10, 0, -1) for hour in range(0, 20, 2)]
    return [
        {"x": float(place), "seen at": day_of(moment), "label": "even" if place % 2 == 0 else "odd"}
        for place, moment in enumerate(moments)
    ]


def table(folder: Path, form: str, rows: list[dict]) -> dict:
    """The rows in one file; gives the data section's settings."""
    folder.mkdir(exist_ok=True)
    file, more = folder / f"events.{form}", {}
    if form in ("csv", "tsv"):
        mark = {"csv": ",", "tsv": "\t"}[form]
        file.write_text("\n".join([mark.join(rows[0]), *(mark.join(map(str, row.values())) for row in rows)]) + "\n")
    elif form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=30)
    else:
        encode = Encoder({"x": Feature(kind="number"), "label": Feature(kind="category")})
        with FrameWriter(file) as writer:
            for row in rows:
                writer.write(finish(encode(row), label_entry("seen at", row["seen at"])))
        types = {"x": "float32", "seen at": "int64", "label": "bytes"}
        more = {"record_features": {name: {"type": type_} for name, type_ in types.items()}}
    return {"source": form, "path": str(folder), "label_key": "label", "splits": SPLITS, **more}


def every_x(folder: Path) -> list[float]:
    manifest = read_manifest(folder)
    return sorted(
        float(decode(record, manifest.features)["x"])
        for split in manifest.splits.values()
        for shard in split.shards
        for record in read_frames(folder / shard.name)
    )


BEHIND_UTC = timezone(timedelta(hours=-5))


@pytest.mark.parametrize(
    ("form", "day_of"),
    [
        ("csv", lambda moment: moment.date().isoformat()),
        ("csv", lambda moment: moment.astimezone(BEHIND_UTC).isoformat()),
        ("tsv", lambda moment: f"{moment:%Y-%m-%d %H:%M:%S}"),
        ("csv", lambda moment: int(moment.timestamp())),
        ("jsonl", lambda moment: int(f"{moment:%Y%m%d}")),
        ("jsonl", lambda moment: moment.timestamp()),
        ("parquet", lambda moment: moment.astimezone(BEHIND_UTC)),
        ("parquet", lambda moment: moment.date()),
        ("tfrecord", lambda moment: int(moment.timestamp())),
    ],
)
def test_exactly_the_rows_whose_column_has_a_day_of_the_window_are_prepared(form, day_of, tmp_path):
    section_of_rows = table(tmp_path / "events", form, rows_of_ten_days(day_of))
    found, manifest = prepared(section_of_rows, tmp_path, "one", days=4, until="2027-01-08", column="seen at")
    assert every_x(tmp_path / "one") == [float(place) for place in range(20, 60)]
    assert list(manifest.features) == ["x"]
    again, later = prepared(section_of_rows, tmp_path, "two", days=4, until="2027-01-09", column="seen at")
    assert again["digest"] == found["digest"]
    assert again != found
    assert later.digest != manifest.digest


def test_rows_that_arrive_outside_the_window_leave_the_data_the_same(tmp_path):
    rows = rows_of_ten_days(lambda moment: moment.date().isoformat())
    events = table(tmp_path / "events", "csv", rows)
    found, manifest = prepared(events, tmp_path, "one", days=4, until="2027-01-08", column="seen at")
    with (tmp_path / "events" / "events.csv").open("a") as file:
        file.write("7,2027-01-20,even\n")
    (tmp_path / "events" / "later.csv").write_text("x,seen at,label\n7,2027-01-21,odd\n")
    other, same = prepared(events, tmp_path, "two", days=4, until="2027-01-08", column="seen at")
    assert other != found
    assert same.digest == manifest.digest


def test_a_row_without_a_day_is_a_bad_record_and_a_window_without_rows_is_refused(tmp_path):
    rows = rows_of_ten_days(lambda moment: moment.date().isoformat())
    rows[25]["seen at"] = "soon"
    events = table(tmp_path / "events", "csv", rows)
    window = {"days": 4, "until": "2027-01-08", "column": "seen at"}
    with pytest.raises(SystemExit) as ended:
        prepared(events, tmp_path, "one", **window)
    assert ended.value.code == 2
    _, manifest = prepared({**events, "on_bad_record": "skip"}, tmp_path, "two", **window)
    assert manifest.num_skipped == 1
    with pytest.raises(BadInput, match="no row's day is from 2028-01-01 to 2028-01-02"):
        prepare(
            section({**events, "on_bad_record": "skip"}, days=2, until="2028-01-02", column="seen at"),
            7, tmp_path / "none",
        )  # fmt: skip
    with pytest.raises(BadInput, match=r'data.window.column = "seen": there is no such column'):
        prepare(section(events, days=2, column="seen"), 7, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("unknown", ["", "{{$.pipeline_job_schedule_time_utc}}", "0001-01-01T00:00:00Z", "2027-01-04"])
def test_the_window_ends_before_the_moment_a_run_was_scheduled_for_where_the_server_tells_it(daily, unknown):
    config = section(daily, days=2).to_json()
    found = json.loads(fingerprint_data.python_func(config, 7, "/nowhere", "code", "", "2027-01-05T03:00:00Z"))
    assert found["until"] == "2027-01-04"
    now = json.loads(fingerprint_data.python_func(config, 7, "/nowhere", "code", "", unknown))
    assert now["until"] >= "2026"
    assert now["until"] != found["until"]


def test_check_finds_one_file_by_its_bare_name_and_says_whose_rows_count(tmp_path, configuration, monkeypatch, capsys):
    events = table(tmp_path / "events", "csv", rows_of_ten_days(lambda moment: moment.date().isoformat()))
    window = {"days": 4, "until": "2027-01-12", "column": "seen at"}
    data = {**events, "path": "events.csv", "window": window}
    monkeypatch.chdir(tmp_path / "events")
    main(["check", str(configuration(json.dumps({"name": "tiny", "data": data})))])
    assert "events.csv: 1 file, rows by seen at of 2027-01-09 to 2027-01-12" in capsys.readouterr().out


def test_a_local_run_takes_its_window_from_the_moment_it_begins(tmp_path, configuration, capsys):
    events = table(tmp_path / "events", "csv", rows_of_ten_days(lambda moment: moment.date().isoformat()))
    data = {**events, "window": {"days": 2, "delay_hours": 6, "column": "seen at"}}
    file = configuration(json.dumps({"name": "tiny", "data": data}))
    before = last_day(DataWindow(days=2, delay_hours=6), datetime.now(UTC)).isoformat()
    assert main(["run", str(file), "--root", str(tmp_path / "root")]) == 2  # these rows are not of the last two days
    after = last_day(DataWindow(days=2, delay_hours=6), datetime.now(UTC)).isoformat()
    (run,) = (tmp_path / "root" / "runs").iterdir()
    said = (run / "logs" / "fingerprint-data.log").read_text()
    assert f"2 days until {before}" in said or f"2 days until {after}" in said
    assert "task prepare-data failed: data.window.column" in capsys.readouterr().err
