"""Schedules: the file's state reached from any state, without a gap, without a double run, touching nobody else's."""

import itertools
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fake_kfp import START, FakeKubeflow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operating import Operator

WEEKLY = "schedules:\n  weekly:\n    cron: 0 3 * * mon\n    timezone: Europe/Berlin\n"
HOURLY = "schedules:\n  hourly:\n    cron: 0 * * * *\n"


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with FakeKubeflow() as server:
        one = Operator(server, tmp_path, monkeypatch)
        one.write(WEEKLY)
        yield one


def jobs(operator: Operator) -> list[dict]:
    return list(operator.server.recurring.values())


def slots(operator: Operator) -> list[datetime]:
    return sorted(datetime.fromisoformat(run["scheduled_at"]) for run in operator.server.runs.values())


def finish_runs(operator: Operator, state: str = "SUCCEEDED") -> None:
    for run in operator.server.runs.values():
        if run["state"] in ("PENDING", "RUNNING"):
            run["state"] = state


def test_a_schedule_reaches_the_server_in_its_own_terms(operator: Operator) -> None:
    said = operator("schedule", "apply", "@")
    assert said.code == 0, said.err
    (job,) = jobs(operator)
    assert job["trigger"]["cron_schedule"]["cron"] == "0 0 2 * * 1"
    assert job["trigger"]["cron_schedule"]["start_time"] == START.isoformat()
    assert (job["mode"], job["no_catchup"], job["max_concurrency"]) == ("ENABLE", True, "1")
    assert job["description"].startswith("0 3 * * mon in Europe/Berlin\ntrireme: ")
    (version,) = operator.server.versions.values()
    assert job["pipeline_version_reference"]["pipeline_version_id"] == version["pipeline_version_id"]


def test_applying_again_touches_nothing_and_diff_says_so(operator: Operator) -> None:
    assert operator("schedule", "diff", "@").code == 1
    operator("schedule", "apply", "@")
    changes = operator.server.changes()
    again = operator("schedule", "apply", "@")
    assert "is as the file says" in again.out
    assert operator("schedule", "diff", "@").code == 0
    assert operator.server.changes() == changes


def test_diff_changes_nothing_even_where_everything_is_new(operator: Operator) -> None:
    said = operator("schedule", "diff", "@")
    assert said.out.startswith("+ weekly")
    assert operator.server.changes() == []


def test_two_who_apply_at_the_same_moment_end_with_one(operator: Operator) -> None:
    plain = operator.server._put

    def with_another(store, key, body):
        if store is operator.server.recurring and len(store) == 0:
            plain(store, key, {"status": "ENABLED", **body})  # the other one is quicker
        return plain(store, key, body)

    operator.server._put = with_another
    said = operator("schedule", "apply", "@")
    assert "somebody else made one at the same moment" in said.out
    assert [job["mode"] for job in jobs(operator)] == ["ENABLE"]
    assert operator("schedule", "diff", "@").code == 0


def test_what_somebody_else_deletes_at_the_same_moment_is_no_failure(operator: Operator) -> None:
    operator("schedule", "apply", "@")
    operator.server.fail("POST", ":disable$", status=404, body='{"message": "not found"}')
    operator.write(WEEKLY.replace("0 3", "0 5"))
    said = operator("schedule", "apply", "@")
    assert (said.code, said.err) == (0, "")
    assert [job["mode"] for job in jobs(operator)] == ["ENABLE"]
    assert operator("schedule", "diff", "@").code == 0


def test_a_name_that_the_server_does_not_know_is_told_with_those_it_knows(operator: Operator) -> None:
    operator("schedule", "apply", "@")
    for verb in ("pause", "delete", "run-now"):
        said = operator("schedule", verb, "@", "wekly")
        assert (
            said.code,
            "schedule = wekly: trireme has no such schedule on the server, which has weekly" in said.err,
        ) == (
            2,
            True,
        )


def test_its_overrides_are_arguments_of_the_same_version(operator: Operator) -> None:
    operator.write(WEEKLY + "    overrides: {train.epochs: 3}\n  daily:\n    cron: '@daily'\n    version: latest\n")
    operator("schedule", "apply", "@")
    weekly, daily = jobs(operator)
    assert json.loads(weekly["runtime_config"]["parameters"]["train"])["epochs"] == 3
    assert "pipeline_version_id" not in daily["pipeline_version_reference"]
    assert len(operator.server.versions) == 1


def test_a_change_leaves_runs_in_flight_alive_and_is_cleared_up_later(operator: Operator) -> None:
    operator("schedule", "apply", "@")
    operator.server.clock.advance(timedelta(days=7))
    (run,) = operator.server.runs.values()
    run["state"] = "RUNNING"
    operator.write(WEEKLY.replace("0 3", "0 5"))
    said = operator("schedule", "apply", "@")
    assert "runs in flight" in said.out
    assert sorted(job["mode"] for job in jobs(operator)) == ["DISABLE", "ENABLE"]
    assert "killed" not in run
    run["state"] = "SUCCEEDED"
    operator("schedule", "apply", "@")
    assert [job["mode"] for job in jobs(operator)] == ["ENABLE"]
    assert "killed" not in run


def test_what_is_not_in_the_file_is_shown_and_goes_only_with_prune(operator: Operator) -> None:
    operator("schedule", "apply", "@")
    operator.write("")
    said = operator("schedule", "apply", "@")
    assert "is on the server and not in the file; remove it with --prune" in said.out
    assert operator("schedule", "diff", "@").code == 1
    assert len(jobs(operator)) == 1
    operator("schedule", "apply", "@", "--prune")
    assert jobs(operator) == []


def test_another_owners_schedule_is_never_touched(operator: Operator) -> None:
    operator.write(WEEKLY, kubeflow="  owner: team-b\n")
    operator("schedule", "apply", "@")
    (theirs,) = jobs(operator)
    before = dict(theirs)
    operator.write(WEEKLY)
    said = operator("schedule", "apply", "@", "--prune")
    assert "belongs to team-b and is left alone" in said.out
    assert len(jobs(operator)) == 2
    assert operator.server.recurring[theirs["recurring_run_id"]] == before
    operator.write("")
    operator("schedule", "apply", "@", "--prune")
    assert jobs(operator) == [before]
    assert "belongs to team-b" in operator("schedule", "delete", "@", "weekly").err


def test_recurring_runs_that_people_made_are_not_looked_at(operator: Operator) -> None:
    operator.server.recurring["theirs"] = {
        "recurring_run_id": "theirs", "display_name": "digits-weekly", "description": "by hand", "mode": "ENABLE",
        "trigger": {"cron_schedule": {"cron": "0 0 2 * * 1"}}, "created_at": START.isoformat(),
    }  # fmt: skip
    operator("schedule", "apply", "@", "--prune")
    assert len(jobs(operator)) == 2
    assert operator.server.recurring["theirs"]["mode"] == "ENABLE"


def test_pausing_and_resuming_makes_up_for_nothing(operator: Operator) -> None:
    operator.write(HOURLY)
    operator("schedule", "apply", "@")
    assert "is paused" in operator("schedule", "pause", "@", "hourly").out
    assert operator("schedule", "diff", "@").out == (
        "~ hourly           was paused on the server\n  hourly           stands still, and a new one takes its place\n"
    )
    operator.server.clock.advance(timedelta(hours=5, minutes=30))
    assert slots(operator) == []
    assert operator("schedule", "diff", "@").code == 1
    assert operator("schedule", "resume", "@", "hourly").code == 0
    operator.server.clock.advance(timedelta(hours=1))
    assert slots(operator) == [START + timedelta(hours=6)]
    assert len(jobs(operator)) == 1


def test_catching_up_is_done_only_where_it_is_asked_for(operator: Operator) -> None:
    operator.write(HOURLY + "    catchup: true\n")
    operator("schedule", "apply", "@")
    operator("schedule", "pause", "@", "hourly")
    operator.server.clock.advance(timedelta(hours=3, minutes=30))
    operator("schedule", "apply", "@")
    operator.server.clock.advance(timedelta(minutes=1))
    assert slots(operator) == [START + timedelta(hours=hour) for hour in (1, 2, 3)]


def test_run_now_starts_what_the_schedule_would(operator: Operator) -> None:
    operator.write(WEEKLY + "    overrides: {train.epochs: 3}\n")
    operator("schedule", "apply", "@")
    said = operator("schedule", "run-now", "@", "weekly")
    assert said.code == 0, said.err
    (run,) = operator.server.runs.values()
    assert run["pipeline_version_reference"] == jobs(operator)[0]["pipeline_version_reference"]
    assert json.loads(run["runtime_config"]["parameters"]["train"])["epochs"] == 3
    assert run["display_name"].startswith("digits-weekly-now-")


def test_delete_stops_at_once_and_lets_a_running_run_end(operator: Operator) -> None:
    operator.write(HOURLY)
    operator("schedule", "apply", "@")
    operator.server.clock.advance(timedelta(hours=1))
    assert "runs in flight" in operator("schedule", "delete", "@", "hourly").out
    assert [job["mode"] for job in jobs(operator)] == ["DISABLE"]
    finish_runs(operator)
    operator("schedule", "delete", "@", "hourly")
    assert jobs(operator) == []


def test_a_moment_that_is_near_is_waited_out(operator: Operator) -> None:
    operator.write(HOURLY)
    operator("schedule", "apply", "@")
    operator.server.clock.advance(timedelta(minutes=59, seconds=30))
    operator.write(HOURLY + "    max_concurrency: 2\n")
    operator("schedule", "apply", "@")
    assert operator.server.clock.slept == [120.0]
    operator.server.clock.advance(timedelta(hours=2))
    assert slots(operator) == [START + timedelta(hours=hour) for hour in (1, 2, 3)]


@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(["apply", "pause", "resume", "apply --prune"]),
            st.sampled_from([0, 1, 2, 3]),
            st.integers(1, 200),
            st.none() | st.integers(0, 12),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_sequence_of_applies_broken_off_anywhere_ends_in_the_files_state(tmp_path_factory, changes) -> None:
    files = [
        HOURLY,
        HOURLY + "    max_concurrency: 3\n",
        HOURLY + "    enabled: false\n",
        "schedules:\n  other:\n    cron: 30 * * * *\n  hourly:\n    cron: 0 * * * *\n",
    ]
    with pytest.MonkeyPatch.context() as patch, FakeKubeflow() as server:
        operator = Operator(server, tmp_path_factory.mktemp("schedules"), patch)
        for words, file, minutes, broken_at in changes:
            operator.write(files[file])
            if broken_at is not None:  # the command dies at this change: everything from there on is refused
                server.fail("POST", "recurringruns|upload|runs", status=400, times=0)
                patch_refusals(server, broken_at)
            verb, *more = words.split()
            operator("schedule", verb, "@", *(["hourly"] if verb in ("pause", "resume") else []), *more)
            server.__dict__.pop("_route", None)
            server.clock.advance(timedelta(minutes=minutes))
            finish_runs(operator)
        operator.write(files[3])
        for _ in range(2):
            assert operator("schedule", "apply", "@", "--prune").code == 0
            finish_runs(operator)  # a schedule that was replaced is kept until what it started has ended
        assert operator("schedule", "apply", "@", "--prune").code == 0
        assert sorted((job["display_name"], job["mode"]) for job in jobs(operator)) == [
            ("digits-hourly", "ENABLE"),
            ("digits-other", "ENABLE"),
        ]
        assert operator("schedule", "diff", "@").code == 0
        seen = [(run["display_name"], run["scheduled_at"]) for run in server.runs.values()]
        assert len(seen) == len(set(seen)), "a moment was run twice"


def patch_refusals(server: FakeKubeflow, after: int) -> None:
    """Lets so many changes of recurring runs through and refuses the rest, as if the command had died there."""
    from fake_kfp import Refusal

    plain, counter = server._route, itertools.count()

    def route(method, path, query, body):
        if method != "GET" and "recurringruns" in path and next(counter) >= after:
            raise Refusal(400, "broken off")
        return plain(method, path, query, body)

    server._route = route


@pytest.mark.parametrize("broken_at", range(5))
def test_a_change_that_is_broken_off_has_neither_gap_nor_double_when_it_is_taken_up(
    operator: Operator, broken_at: int
) -> None:
    operator.write(HOURLY)
    operator("schedule", "apply", "@")
    operator.server.clock.advance(timedelta(minutes=90))
    finish_runs(operator)
    operator.write(HOURLY + "    max_concurrency: 2\n")
    patch_refusals(operator.server, broken_at)
    operator("schedule", "apply", "@")
    del operator.server._route
    operator.server.clock.advance(timedelta(minutes=60))  # a moment passes before anybody tries again
    finish_runs(operator)
    assert operator("schedule", "apply", "@").code == 0
    operator.server.clock.advance(timedelta(minutes=60))
    assert slots(operator) == [START + timedelta(hours=hour) for hour in (1, 2, 3)]
    finish_runs(operator)
    operator("schedule", "apply", "@")
    assert [job["max_concurrency"] for job in jobs(operator)] == ["2"]


@pytest.mark.parametrize("path", [r"recurringruns$", ":disable", ":enable"])
@pytest.mark.parametrize("fault", [{"lost": True}, {"status": 503}, {"status": 504, "done": True}])
def test_lost_answers_make_no_second_schedule(operator: Operator, path: str, fault: dict) -> None:
    operator.write(HOURLY)
    operator("schedule", "apply", "@")
    operator.write(HOURLY + "    max_concurrency: 2\n")
    operator.server.fail("POST", path, **fault)
    operator.server.fail("DELETE", "recurringruns", **fault)
    assert operator("schedule", "apply", "@").code == 0
    assert [(job["mode"], job["max_concurrency"]) for job in jobs(operator)] == [("ENABLE", "2")]


def test_a_change_of_the_clocks_is_a_difference_that_apply_mends(operator: Operator) -> None:
    operator("schedule", "apply", "@")
    operator.server.clock.moment = datetime(2027, 3, 25, 12, tzinfo=UTC)
    finish_runs(operator)
    assert operator("schedule", "diff", "@").code == 1
    operator("schedule", "apply", "@")
    assert [job["trigger"]["cron_schedule"]["cron"] for job in jobs(operator)] == ["0 0 1 * * 1"]


def test_preview_asks_no_server_and_shows_zone_utc_and_drift(operator: Operator) -> None:
    operator.server.clock.moment = datetime(2027, 3, 20, tzinfo=UTC)
    said = operator("schedule", "preview", "@", "weekly", "-n", "2")
    assert said.out.splitlines() == [
        "weekly: 0 3 * * mon in Europe/Berlin; the server gets 0 0 2 * * 1 in UTC",
        "  Mon 2027-03-22 03:00 CET   2027-03-22 02:00 UTC",
        "  Mon 2027-03-29 04:00 CEST   2027-03-29 02:00 UTC  60 min late: daylight saving; apply again then",
    ]
    assert operator.server.requests == []
    assert "is not in the file, which has weekly" in operator("schedule", "preview", "@", "daily").err


def test_status_tells_health_from_lateness_and_failure(operator: Operator) -> None:
    operator.write(HOURLY)
    assert operator("schedule", "status", "@").code == 1
    operator("schedule", "apply", "@")
    said = operator("schedule", "status", "@")
    assert (said.code, "has not run" in said.out, "next 2027-01-04 13:00 UTC" in said.out) == (0, True, True)
    operator.server.clock.advance(timedelta(hours=1))
    finish_runs(operator)
    assert operator("schedule", "status", "@").code == 0
    operator.server.clock.waking.clear()  # the server's scheduler stands still
    operator.server.clock.advance(timedelta(hours=1, minutes=14))
    assert operator("schedule", "status", "@").code == 0
    operator.server.clock.advance(timedelta(minutes=2))
    late = operator("schedule", "status", "@")
    assert late.code == 1
    assert "LATE: should have run at 2027-01-04 14:00 UTC" in late.out


def test_status_counts_failures_in_a_row(operator: Operator) -> None:
    operator.write(HOURLY)
    operator("schedule", "apply", "@")
    for state in ("FAILED", "SUCCEEDED", "FAILED", "FAILED"):
        operator.server.clock.advance(timedelta(hours=1))
        finish_runs(operator, state)
    assert operator("schedule", "status", "@").code == 0
    said = operator("schedule", "status", "@", "--failures", "2")
    assert (said.code, "FAILED 2 times in a row" in said.out) == (1, True)
    assert json.loads(operator("schedule", "status", "@", "--json").out)[0]["failures_in_a_row"] == 2


def test_status_says_what_is_wrong_and_what_mends_it(operator: Operator) -> None:
    operator.write(HOURLY)
    missing = operator("schedule", "status", "@")
    assert (missing.code, "is NOT on the server: schedule apply" in missing.out) == (1, True)
    operator("schedule", "apply", "@")
    for _ in range(3):
        operator.server.clock.advance(timedelta(hours=1))
        finish_runs(operator, "FAILED")
    newest = list(operator.server.runs.values())[-1]
    newest["error"] = {"code": 2, "message": "out of memory"}
    failing = operator("schedule", "status", "@")
    assert (failing.code, "FAILED 3 times in a row; out of memory" in failing.out) == (1, True)
    operator("schedule", "pause", "@", "hourly")
    paused = operator("schedule", "status", "@", "--failures", "9")
    assert (paused.code, "was PAUSED on the server: schedule resume" in paused.out) == (1, True)
    operator.write(f"{HOURLY}    enabled: false\n")
    still = operator("schedule", "status", "@")
    assert (still.code, still.out.split()[1], "FAILED" in still.out) == (0, "disabled", False)
    operator.write(HOURLY)
    operator("schedule", "resume", "@", "hourly")
    operator.write(f"{HOURLY}    enabled: false\n")
    assert "the file has it disabled: schedule apply" in operator("schedule", "status", "@").out


def test_list_shows_what_is_on_the_server_over_all_pages(operator: Operator) -> None:
    names = "".join(f"  s{index}:\n    cron: {index} 3 * * *\n" for index in range(5))
    operator.write("schedules:\n" + names)
    operator("schedule", "apply", "@")
    assert operator.server.page_size_limit < 5
    rows = json.loads(operator("schedule", "list", "@", "--json").out)
    assert [row["schedule"] for row in rows] == [f"s{index}" for index in range(5)]
    assert operator("schedule", "diff", "@").code == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("cron: 0 3 * *", 'schedules.w.cron = "0 3 * *": must have five fields'),
        ("cron: 0 3 * * *, timezone: Mars/Phobos", 'schedules.w.timezone = "Mars/Phobos": is no time zone'),
        ("cron: 0 3 * * *, start: tomorrow", 'schedules.w.start = "tomorrow": must be a date and time'),
        ("cron: 0 3 * * *, start: '2027-01-01T00:00:00'", "must say its time zone"),
        ("cron: 0 3 * * *, end: '2027-01-01T00:00:00Z', start: '2027-02-01T00:00:00Z'", "must be after start"),
        ("cron: 0 3 * * *, max_concurrency: 11", "schedules.w.max_concurrency = 11: must be at most 10"),
        ("cron: 0 3 * * *, overrides: {cluster.image: x}", "can override data, train, evaluate, serving, push"),
        ("cron: 0 3 * * *, overrides: {train.epoch: 3}", "train.epoch = 3: unknown key; did you mean epochs?"),
        ("cron: 30 0 1 * *, timezone: Europe/Berlin", "in UTC it falls on the day before"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_work_is_refused_before_anything_is_asked(
    operator: Operator, more: str, message: str
) -> None:
    operator.write(f"schedules:\n  w: {{{more}}}\n")
    said = operator("schedule", "preview", "@")
    assert said.code == 2
    assert message in said.err


def two(cron: str, more: str = "", zone: str = "UTC") -> str:
    return f'{WEEKLY}  other:\n    cron: "{cron}"\n    timezone: {zone}\n{more}'


@pytest.mark.parametrize(
    ("text", "moments"),
    [
        (two("0 3 * * *", zone="Europe/Berlin"), "Mon 2027-01-11 03:00 CET (2027-01-11 02:00 UTC)"),
        (two("*/10 2 * * *"), "Mon 2027-01-11 03:00 CET, Mon 2027-01-11 02:00 UTC (2027-01-11 02:00 UTC)"),
        # 2027-03-29 is the first Monday on which three o'clock in Berlin is one o'clock in UTC
        (two("0 1 * * *"), "Mon 2027-03-29 03:00 CEST, Mon 2027-03-29 01:00 UTC (2027-03-29 01:00 UTC)"),
        (
            two("0 3 * * mon", "    overrides: {seed: 7}\n", "Europe/Berlin"),
            "Mon 2027-01-11 03:00 CET",
        ),  # as the file has it
    ],
)
def test_two_schedules_that_start_the_same_run_at_once_are_warned_of(
    operator: Operator, text: str, moments: str
) -> None:
    operator.write(f"seed: 7\n{text}")
    sentence = f"weekly and other both run at {moments}"
    preview, apply = operator("schedule", "preview", "@"), operator("schedule", "apply", "@")
    assert (preview.code, apply.code) == (0, 0)
    assert preview.err == apply.err
    assert preview.err.startswith(f"trireme: warning: schedules {sentence}")
    assert preview.err.count("\n") == 1
    assert len(jobs(operator)) == 2
    assert f"warning schedule: {sentence}" in operator("check", "@", "--target", "kubeflow").out


@pytest.mark.parametrize(
    "text",
    [
        two("30 2 * * *"),
        two("0 3 * * mon", "    overrides: {train.epochs: 3}\n", "Europe/Berlin"),
        two("0 3 * * mon", "    enabled: false\n", "Europe/Berlin"),
        two("0 3 * * mon", "    end: 2027-01-10T00:00:00Z\n", "Europe/Berlin"),
        two("1-59/2 * * * *"),
    ],
)
def test_schedules_that_differ_in_moment_or_settings_are_not_warned_of(operator: Operator, text: str) -> None:
    operator.write(text)
    assert operator("schedule", "preview", "@").err == ""


@pytest.mark.parametrize("count", ["0", "-1", "x", "9" * 5000])
@pytest.mark.parametrize("words", [["schedule", "preview", "@", "-n"], ["runs", "list", "@", "-n"]])
def test_a_number_of_lines_that_cannot_be_is_refused(operator: Operator, words, count: str) -> None:
    said = operator(*words, count)
    assert said.code == 2
    assert "argument -n: " in said.err
    assert operator.server.requests == []


def test_a_schedule_that_has_ended_says_so_and_one_at_the_end_of_time_is_refused(operator: Operator) -> None:
    operator.write("schedules:\n  w:\n    cron: 0 3 * * *\n    end: 2020-01-01T00:00:00Z\n")
    assert operator("schedule", "preview", "@").out.endswith("in UTC\n  has ended\n")
    operator.write("schedules:\n  w:\n    cron: 0 3 29 2 *\n    start: 9999-12-31T00:00:00Z\n")
    said = operator("schedule", "preview", "@")
    assert (said.code, "must be of a year from 2000 to 2999" in said.err) == (2, True)


def test_a_file_without_schedules_says_so(operator: Operator) -> None:
    operator.write()
    for verb in ("apply", "diff"):
        said = operator("schedule", verb, "@")
        assert (said.code, said.out) == (0, "no schedules in the file and none on the server\n")
    assert operator("schedule", "status", "@").out == "the file has no schedules\n"
