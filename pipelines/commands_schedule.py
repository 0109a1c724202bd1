"""The commands that look after a pipeline's schedules: the file says what is to be, `apply` makes it so."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from pipelines.commands_kubeflow import access_flags, connect
from pipelines.flags import count, exit_codes
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInput

if TYPE_CHECKING:
    from pipelines.config import Config
    from pipelines.targets.schedules import Found


_DIFFERENT = {
    "missing": "is NOT on the server: schedule apply",
    "paused": "was PAUSED on the server: schedule resume",
    "changed": "the server's is not the file's: see schedule diff",
}
_NONE = "no schedules in the file and none on the server"


def register(commands: argparse._SubParsersAction, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `schedule` and its verbs to the command line."""
    summary = "make the server's schedules equal the file's, and look after them"
    schedule = commands.add_parser("schedule", help=summary, description=f"M{summary[1:]}.")
    verbs = schedule.add_subparsers(title="verbs", metavar="VERB", required=True)

    apply = command(verbs, "apply", _apply, "make the server's schedules equal the file's")
    apply.add_argument("--prune", action="store_true", help="also remove what is on the server and not in the file")
    command(
        verbs,
        "diff",
        _diff,
        "say what apply would do; exit with 1 if it would do anything",
        exit_codes("apply would do something"),
    )
    command(verbs, "list", _list, "list this pipeline's schedules on the server")
    preview = command(verbs, "preview", _preview, "print the next runs, in the zone and in UTC; asks no server")
    preview.add_argument("name", nargs="?", metavar="NAME", help="schedule of the file (default: all)")
    preview.add_argument(
        "-n", dest="count", type=count, default=5, metavar="N", help="how many of each (default: %(default)s)"
    )
    preview.add_argument("--json", action="store_true", help="print one line of JSON")
    for name, function, summary in (
        ("pause", _pause, "stop a schedule on the server until it is resumed or applied"),
        ("resume", _resume, "let a paused schedule run again; what it missed is not made up for"),
        ("run-now", _run_now, "start what a schedule would start, now"),
        ("delete", _delete, "remove a schedule from the server; its running runs go on"),
    ):
        command(verbs, name, function, summary).add_argument(
            "name", metavar="NAME", help="schedule, as the file names it"
        )
    status = command(
        verbs,
        "status",
        _status,
        "say how each schedule fares; exit with 1 if one is late, keeps failing, is paused or missing",
        exit_codes("a schedule is late, keeps failing, is paused or missing"),
    )
    status.add_argument("--grace-minutes", type=count, default=15, metavar="N",
                        help="how late a run may start (default: %(default)s)")  # fmt: skip
    status.add_argument("--failures", type=count, default=3, metavar="K",
                        help="failures in a row that are too many (default: %(default)s)")  # fmt: skip
    for name, verb in verbs.choices.items():
        if name != "preview":
            verb.add_argument("--json", action="store_true", help="print one line of JSON")
            access_flags(verb)


def _load(arguments: argparse.Namespace) -> "Config":
    from pipelines.config import load_config

    return load_config(arguments.config, arguments.overrides)


def _apply(arguments: argparse.Namespace) -> int:
    from pipelines.targets import schedules

    config = _load(arguments)
    server = connect(arguments, config)
    wanted = schedules.wanted_schedules(config, server.clock.now())
    _warn(config, server.clock.now())
    steps = schedules.plan(wanted, schedules.recurring_runs(server, config), config.kubeflow.owner)
    done = []
    with _said_if_broken_off():
        for one in schedules.apply(server, config, steps, arguments.prune):
            done.append({"schedule": one.step.name, "step": one.step.kind, "text": one.text})
            if not arguments.json:
                print(f"{one.step.name:<16} {one.text}", flush=True)
    if arguments.json:
        print(json.dumps(done, ensure_ascii=False))
    elif not done:
        print(_NONE)
    return EXIT_DONE


def _diff(arguments: argparse.Namespace) -> int:
    from pipelines.targets import schedules

    config = _load(arguments)
    server = connect(arguments, config)
    wanted = schedules.wanted_schedules(config, server.clock.now())
    steps = schedules.plan(wanted, schedules.recurring_runs(server, config), config.kubeflow.owner)
    if arguments.json:
        rows = [{"schedule": one.name, "step": one.kind, "text": one.reason, "differs": one.differs} for one in steps]
        print(json.dumps(rows, ensure_ascii=False))
    else:
        signs = {"create": "+", "extra": "-", "keep": " ", "foreign": " ", "retire": " "}
        for one in steps:
            print(f"{signs.get(one.kind, '~')} {one.name:<16} {one.reason}")
        if not steps:
            print(_NONE)
    return EXIT_FAILED if any(one.differs for one in steps) else EXIT_DONE


def _list(arguments: argparse.Namespace) -> int:
    from pipelines.targets import schedules

    config = _load(arguments)
    rows = [
        {
            "schedule": one.name, "owner": one.owner, "enabled": one.enabled, "cron": one.cron,
            "said": (one.raw.description or "").splitlines()[0], "id": one.id, "created_at": one.created_at.isoformat(),
        }
        for one in schedules.recurring_runs(connect(arguments, config), config)
    ]  # fmt: skip
    if arguments.json:
        print(json.dumps(rows, ensure_ascii=False))
        return EXIT_DONE
    for row in rows:
        state = "enabled" if row["enabled"] else "stopped"
        print(f"{row['schedule']:<16} {state:<8} {row['said']:<34} {row['cron']:<20} {row['owner']:<12} {row['id']}")
    if not rows:
        print(f"{config.name} has no schedules on the server")
    return EXIT_DONE


def _preview(arguments: argparse.Namespace) -> int:
    from pipelines import moments
    from pipelines.targets import access

    config, now = _load(arguments), access.system_clock().now()
    if arguments.name is not None:
        _known(config, arguments.name)
    shown = {}
    for name, schedule in config.schedules.items():
        if arguments.name in (None, name):
            cron = moments.translated(name, schedule, now)
            shown[name] = {"cron": schedule.cron, "timezone": schedule.timezone, "server_cron": cron,
                           "moments": _moments(schedule, now, arguments.count)}  # fmt: skip
    _warn(config, now)
    if arguments.json:
        print(json.dumps(shown, ensure_ascii=False))
        return EXIT_DONE
    for name, one in shown.items():
        print(f"{name}: {one['cron']} in {one['timezone']}; the server gets {one['server_cron']} in UTC")
        if not one["moments"]:
            print("  has ended")
        for moment in one["moments"]:
            late = moment["late_minutes"]
            note = (
                f"  {abs(late)} min {'late' if late > 0 else 'early'}: daylight saving; apply again then"
                if late
                else ""
            )
            print(f"  {moment['local']}   {moment['utc']}{note}")
    if not shown:
        print("the file has no schedules")
    return EXIT_DONE


@contextlib.contextmanager
def _said_if_broken_off() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("trireme: broken off before all was done; the same command goes on from here", file=sys.stderr)
        raise


def _warn(config: "Config", now: datetime) -> None:
    from pipelines import moments

    for sentence in moments.coincidences(config, now):
        print(f"trireme: warning: schedules {sentence}", file=sys.stderr)


def _moments(schedule: Any, now: datetime, count: int) -> list[dict[str, Any]]:
    from pipelines.cron import parse_cron, preview, zone_of

    zone = zone_of(schedule.timezone)
    begin = max(now, schedule.start_time or now)
    return [
        {
            "local": f"{one.at.astimezone(zone):%a %Y-%m-%d %H:%M %Z}",
            "utc": f"{one.at:%Y-%m-%d %H:%M} UTC",
            "late_minutes": one.late_minutes,
        }
        for one in preview(parse_cron(schedule.cron), zone, begin, count)
        if schedule.end_time is None or one.at <= schedule.end_time
    ]


def _pause(arguments: argparse.Namespace) -> int:
    from pipelines.targets import schedules

    config = _load(arguments)
    server = connect(arguments, config)
    found = _ours(schedules.recurring_runs(server, config), config, arguments.name)
    schedules.pause(server, found)
    return _said(arguments, "paused", "is paused, until it is resumed or a file that has it enabled is applied")


def _resume(arguments: argparse.Namespace) -> int:
    from pipelines.targets import schedules

    config = _load(arguments)
    _known(config, arguments.name)
    if not config.schedules[arguments.name].enabled:
        raise BadInput(f"schedules.{arguments.name}.enabled = false: set it to true and apply")
    server = connect(arguments, config)
    found = schedules.recurring_runs(server, config)
    _ours(found, config, arguments.name)
    wanted = [one for one in schedules.wanted_schedules(config, server.clock.now()) if one.name == arguments.name]
    steps = [one for one in schedules.plan(wanted, found, config.kubeflow.owner) if one.name == arguments.name]
    with _said_if_broken_off():
        for _ in schedules.apply(server, config, [one for one in steps if one.kind not in ("extra", "foreign")]):
            pass
    return _said(arguments, "resumed", "runs again")


def _run_now(arguments: argparse.Namespace) -> int:
    from pipelines.targets import kubeflow, schedules

    config = _load(arguments)
    server = connect(arguments, config)
    found = _ours(schedules.recurring_runs(server, config), config, arguments.name)
    run = schedules.run_now(server, config, next((one for one in found if one.enabled), found[-1]))
    page = kubeflow.link(server, "runs", "details", run.run_id)
    if arguments.json:
        print(json.dumps({"run_id": run.run_id, "name": run.display_name, "link": page}))
    else:
        print(f"{run.display_name} ({run.run_id}) started\n{page}")
    return EXIT_DONE


def _delete(arguments: argparse.Namespace) -> int:
    from pipelines.targets import schedules

    config = _load(arguments)
    server = connect(arguments, config)
    text = schedules.delete(server, _ours(schedules.recurring_runs(server, config), config, arguments.name))
    return _said(arguments, "deleted", f"is stopped{text}")


def _status(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from pipelines.targets import schedules
    from pipelines.targets.health import health

    config = _load(arguments)
    server = connect(arguments, config)
    found, grace = schedules.recurring_runs(server, config), timedelta(minutes=arguments.grace_minutes)
    rows = [
        health(server, config, one, found, grace, arguments.failures)
        for one in schedules.wanted_schedules(config, server.clock.now())
    ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], ensure_ascii=False, default=str))
    for row in () if arguments.json else rows:
        last = f"{row.last.state.lower()} ({row.last.verdict or 'no verdict'})" if row.last else "has not run"
        following = f"next {row.next_at:%Y-%m-%d %H:%M} UTC" if row.next_at else "does not run"
        notes = [_DIFFERENT[row.state]] if row.state in _DIFFERENT else []
        if row.state == "running" and not config.schedules[row.name].enabled:
            notes.append("the file has it disabled: schedule apply")
        if row.late_since:
            notes.append(f"LATE: should have run at {row.late_since:%Y-%m-%d %H:%M} UTC")
        if row.failures_in_a_row >= arguments.failures and row.state != "disabled":
            notes.append(f"FAILED {row.failures_in_a_row} times in a row")
        if row.last and row.last.error:
            notes.append(row.last.error)
        print(f"{row.name:<16} {row.state:<8} {last:<26} {following}" + "".join(f"; {note}" for note in notes))
    if not rows and not arguments.json:
        print("the file has no schedules")
    return EXIT_DONE if all(row.ok for row in rows) else EXIT_FAILED


def _known(config: "Config", name: str) -> None:
    if name not in config.schedules:
        known = ", ".join(config.schedules) or "none"
        raise BadInput(f"schedule = {name}: is not in the file, which has {known}")


def _ours(found: "Sequence[Found]", config: "Config", name: str) -> "list[Found]":
    ours = [one for one in found if one.name == name and one.owner == config.kubeflow.owner]
    if not ours:
        others = sorted({one.owner for one in found if one.name == name})
        there = dict.fromkeys(one.name for one in found if one.owner == config.kubeflow.owner)
        whose = (
            f"; one of that name belongs to {', '.join(others)}"
            if others
            else f", which has {', '.join(there) or 'none'}"
        )
        raise BadInput(f"schedule = {name}: {config.kubeflow.owner} has no such schedule on the server{whose}")
    return ours


def _said(arguments: argparse.Namespace, state: str, text: str) -> int:
    print(json.dumps({"schedule": arguments.name, "state": state}) if arguments.json else f"{arguments.name}: {text}")
    return EXIT_DONE
