"""Makes the server's recurring runs equal the schedules of a configuration, and looks after them.

    wanted = wanted_schedules(server, config)
    found = recurring_runs(server, config)
    steps = plan(wanted, found)                 # pure: what differs, and what is to be done
    apply(server, config, steps)

The server cannot change a recurring run and kills the runs of one that is deleted. So a change is a new one, made asleep;
then the old one is stopped, the new one woken, and the old one deleted once nothing of it runs. If this is broken off
anywhere, the next `apply` goes on: at no time do both run, and a moment that passes in between is made up for by the new one.
"""

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from pipelines.config import Config
from pipelines.cron import parse_server_cron, zone_of
from pipelines.moments import translated
from pipelines.operation import ScheduleConfig
from pipelines.targets import kubeflow
from pipelines.targets.access import Missing, Server
from trainer.errors import BadInput

_LABEL = re.compile(r"^trireme: (\{.*\})$", re.MULTILINE)
_QUIET = timedelta(seconds=90)
_UTC = zone_of("UTC")


@dataclass(frozen=True)
class Wanted:
    """A schedule of the configuration, in the server's terms."""

    name: str
    schedule: ScheduleConfig
    cron: str
    """Six fields in UTC."""
    version: str | None
    """Name of the pipeline's version. None: the newest, whenever it runs."""
    shape: Config
    """What is compiled and uploaded as that version."""
    arguments: dict[str, Any]
    """Arguments of the pipeline."""
    spec: str
    """Digest of everything that the server cannot change once it is made."""

    @property
    def enabled(self) -> bool:
        """Whether it is to run."""
        return self.schedule.enabled


@dataclass(frozen=True)
class Found:
    """A recurring run of ours on the server."""

    id: str
    owner: str
    name: str
    """Of the schedule."""
    spec: str
    replaces: str | None
    """The one it was made to take the place of."""
    enabled: bool
    created_at: datetime
    cron: str
    start: datetime | None
    experiment_id: str | None
    raw: Any


class Step(NamedTuple):
    """One thing to be done, or only to be said."""

    kind: Literal["keep", "create", "replace", "finish", "disable", "retire", "extra", "foreign"]
    name: str
    reason: str
    wanted: Wanted | None = None
    found: tuple[Found, ...] = ()
    """What is stopped, woken, or deleted."""
    kept: tuple[Found, ...] = ()
    """What stays of it."""

    @property
    def differs(self) -> bool:
        """Whether the server is not as the file says."""
        return self.kind in ("create", "replace", "finish", "disable", "extra")


def wanted_schedules(config: Config, now: datetime) -> list[Wanted]:
    """The schedules of a configuration.

    Raises:
        BadInput: One cannot be said in the server's terms.
    """
    return [_wanted(config, name, schedule, now) for name, schedule in config.schedules.items()]


def _wanted(config: Config, name: str, schedule: ScheduleConfig, now: datetime) -> Wanted:
    import tempfile
    from pathlib import Path

    path = f"schedules.{name}"
    shape, arguments = kubeflow.arguments_of(config.scheduled(name), config)
    if shape != config and schedule.version == "latest":
        raise BadInput(f"{path}.version = latest: its overrides change the pipeline itself; use version: pin")
    root = kubeflow.root_of(config, None)
    version = None
    if schedule.version == "pin":
        with tempfile.TemporaryDirectory() as folder:
            version = kubeflow.version_name(kubeflow.compiled(shape, Path(folder)))
    cron = translated(name, schedule, now)
    facts = [cron, version, arguments, schedule.start, schedule.end, schedule.max_concurrency, schedule.catchup,
             config.cluster.service_account, kubeflow.artifact_root(root)]  # fmt: skip
    spec = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return Wanted(name, schedule, cron, version, shape, arguments, spec)


def recurring_runs(server: Server, config: Config) -> list[Found]:
    """Every recurring run of this pipeline that Trireme made, of any owner, oldest first."""
    found = []
    for raw in _listed(server):
        match = _LABEL.search(raw.description or "")
        try:
            label = json.loads(match[1]) if match else {}
        except ValueError:
            continue
        if label.get("pipeline") != config.name:
            continue
        trigger = raw.trigger.cron_schedule
        found.append(
            Found(
                raw.recurring_run_id,
                label.get("owner", ""),
                label.get("schedule", ""),
                label.get("spec", ""),
                label.get("replaces"),
                raw.mode == "ENABLE",
                raw.created_at,
                trigger.cron,
                trigger.start_time,
                raw.experiment_id,
                raw,
            )
        )
    return sorted(found, key=lambda one: (one.created_at, one.id))


def _listed(server: Server) -> Iterator[Any]:
    token = ""
    while True:
        page = server.call(
            "list the schedules",
            lambda client, token=token: client.list_recurring_runs(
                page_token=token, page_size=100, namespace=server.access.namespace
            ),
        )
        yield from page.recurring_runs or ()
        token = page.next_page_token
        if not token:
            return


def plan(wanted: Sequence[Wanted], found: Sequence[Found], owner: str) -> list[Step]:
    """What has to be done, for each schedule of the file and each recurring run of the server. Asks and changes nothing."""
    steps: list[Step] = []
    mine = [one for one in found if one.owner == owner]
    for one in wanted:
        steps += _steps(one, [other for other in mine if other.name == one.name])
    names = {one.name for one in wanted}
    for other in mine:
        if other.name not in names:
            steps.append(Step("extra", other.name, "is on the server and not in the file", found=(other,)))
    for other in found:
        if other.owner != owner:
            steps.append(Step("foreign", other.name, f"belongs to {other.owner} and is left alone", found=(other,)))
    return steps


def _steps(wanted: Wanted, mine: list[Found]) -> Iterator[Step]:
    name = wanted.name
    same = [one for one in mine if one.spec == wanted.spec]
    live = [one for one in mine if one.enabled]
    if not wanted.enabled:
        kept = same[:1]
        if live:
            yield Step("disable", name, "is to stand still", wanted, tuple(live), tuple(kept))
        if not kept:
            yield Step("create", name, "is new, and stands still", wanted)
        elif not live:
            yield Step("keep", name, "is as the file says, and stands still", wanted, tuple(kept))
    elif live_same := [one for one in live if one.spec == wanted.spec]:
        kept = live_same[:1]
        doubles = [one for one in live if one is not kept[0]]
        if doubles:
            yield Step("disable", name, "runs twice", wanted, tuple(doubles))
            kept = [*kept, *doubles]  # deleted by the step itself
        else:
            yield Step("keep", name, "is as the file says", wanted, tuple(kept))
    else:
        ids = {one.id for one in mine}
        broken_off = [one for one in same if one.replaces in ids]
        kept = []
        if not live and broken_off:
            kept = broken_off[-1:]
            yield Step("finish", name, "was broken off before it was woken", wanted, tuple(kept))
        elif not live and same and wanted.schedule.catchup:
            kept = same[-1:]
            yield Step("finish", name, "was paused, and makes up for what it missed", wanted, tuple(kept))
        elif live:
            yield Step("replace", name, "has changed", wanted, tuple(live))
            kept = live  # deleted by the replacement itself, when nothing of them runs
        elif same:
            yield Step("replace", name, "was paused on the server", wanted)
        else:
            yield Step("create", name, "is new", wanted)
    gone = [one for one in mine if one not in kept and not one.enabled]
    if gone:
        paused = wanted.enabled and not live and not kept
        reason = "stands still, and a new one takes its place" if paused else "was replaced before"
        yield Step("retire", name, reason, wanted, tuple(gone))


class Done(NamedTuple):
    """What was done for one step."""

    step: Step
    text: str


def apply(server: Server, config: Config, steps: Iterable[Step], prune: bool = False) -> Iterator[Done]:
    """Does what the plan says. Broken off anywhere, it can be called again with a new plan."""
    for step in steps:
        match step.kind:
            case "keep" | "foreign":
                text = step.reason
            case "create":
                _create(server, config, step.wanted, None, step.wanted.enabled)
                text = f"{step.reason}: made{_undouble(server, config, step.wanted)}"
            case "replace":
                text = (
                    f"{step.reason}: replaced{_replace(server, config, step)}{_undouble(server, config, step.wanted)}"
                )
            case "finish":
                _wake(server, step.found[0])
                text = f"{step.reason}: woken"
            case "disable":
                for one in step.found:
                    _stop(server, one)
                text = f"{step.reason}: stopped{_retire(server, [one for one in step.found if one not in step.kept])}"
            case "retire":
                text = f"{step.reason}{_retire(server, step.found)}"
            case "extra" if prune:
                text = f"{step.reason}{delete(server, step.found)}"
            case _:
                text = f"{step.reason}; remove it with --prune"
        yield Done(step, text)


def delete(server: Server, found: Iterable[Found]) -> str:
    """Stops recurring runs, and deletes those of which nothing runs."""
    found = tuple(found)
    for one in found:
        if one.enabled:
            _stop(server, one)
    return _retire(server, found)


def pause(server: Server, found: Iterable[Found]) -> None:
    """Stops recurring runs until `resume` or the next `apply` of a file that has them enabled."""
    for one in found:
        if one.enabled:
            _stop(server, one)


def run_now(server: Server, config: Config, found: Found) -> Any:
    """Starts a run of what a recurring run would start, besides its own runs."""
    name = f"{config.name}-{found.name}-now-{server.clock.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    reference = found.raw.pipeline_version_reference
    arguments = (found.raw.runtime_config.parameters if found.raw.runtime_config else None) or {}
    return kubeflow.start(
        server, name, found.experiment_id, reference.pipeline_id, reference.pipeline_version_id, arguments, config,
        kubeflow.root_of(config, arguments.get("root")),
    )  # fmt: skip


def _create(server: Server, config: Config, wanted: Wanted, replaces: str | None, enabled: bool) -> Found:
    """Makes a recurring run. What came before this moment is none of its business, unless it is new and catches up."""
    import kfp_server_api as api

    uploaded = kubeflow.upload(server, wanted.shape)
    experiment_id = kubeflow.find_experiment(server, kubeflow.experiment_of(config), make=True)
    schedule, now = wanted.schedule, server.clock.now()
    begin = schedule.start_time or now
    if not (schedule.catchup and replaces is None):
        begin = max(begin, now)
    label = {
        "owner": config.kubeflow.owner, "pipeline": config.name, "schedule": wanted.name, "spec": wanted.spec,
        "nonce": secrets.token_hex(4), **({"replaces": replaces} if replaces else {}),
    }  # fmt: skip
    description = f"{schedule.cron} in {schedule.timezone}\ntrireme: {json.dumps(label, sort_keys=True)}"
    body = api.V2beta1RecurringRun(
        experiment_id=experiment_id,
        display_name=f"{config.name}-{wanted.name}",
        description=description,
        mode="ENABLE" if enabled else "DISABLE",
        no_catchup=not schedule.catchup,
        max_concurrency=str(schedule.max_concurrency),
        service_account=config.cluster.service_account,
        trigger=api.V2beta1Trigger(
            cron_schedule=api.V2beta1CronSchedule(
                cron=wanted.cron, start_time=begin.astimezone(UTC), end_time=schedule.end_time
            )
        ),
        runtime_config=api.V2beta1RuntimeConfig(
            parameters=wanted.arguments, pipeline_root=kubeflow.artifact_root(kubeflow.root_of(config, None))
        ),
        pipeline_version_reference=api.V2beta1PipelineVersionReference(
            pipeline_id=uploaded.pipeline_id, pipeline_version_id=uploaded.version_id if wanted.version else None
        ),
    )

    def find() -> str | None:
        return next((one.recurring_run_id for one in _listed(server) if one.description == description), None)

    made = server.make(
        f"make the schedule {wanted.name}",
        lambda client: client._recurring_run_api.recurring_run_service_create_recurring_run(body).recurring_run_id,
        find,
    )
    return next(one for one in recurring_runs(server, config) if one.id == made)


def _replace(server: Server, config: Config, step: Step) -> str:
    old = step.found
    _await_quiet(server, [step.wanted.cron, *(one.cron for one in old)])
    new = _create(server, config, step.wanted, old[-1].id if old else None, enabled=not old)
    if not old:
        return ""
    for one in old:
        _stop(server, one)
    if any(_ran_since(server, one, new.start or new.created_at) for one in old):
        _retire(server, [new])  # the calls took so long that a moment passed, and the old one ran it
        _create(server, config, step.wanted, old[-1].id, enabled=True)
    else:
        _wake(server, new)
    return _retire(server, old)


def _undouble(server: Server, config: Config, wanted: Wanted) -> str:
    """Where somebody else applied at the same moment there are two; of which both keep the older."""
    owner = config.kubeflow.owner
    mine = [one for one in recurring_runs(server, config) if one.owner == owner and one.name == wanted.name]
    for step in _steps(wanted, mine):
        if step.kind == "disable":
            for one in step.found:
                _stop(server, one)
            _retire(server, [one for one in step.found if one not in step.kept])
            return "; somebody else made one at the same moment, and the older stays"
    return ""


def _ran_since(server: Server, one: Found, moment: datetime) -> bool:
    return any((run.scheduled_at or run.created_at) > moment for run in runs_of(server, [one]))


def _await_quiet(server: Server, crons: Sequence[str]) -> None:
    """Waits until no moment is near, so that clocks which differ a little cannot lose or double one."""
    for _ in range(3):
        now = server.clock.now()
        near = [
            moment for cron in crons
            if (moment := parse_server_cron(cron).last_before(now + _QUIET, _UTC)) is not None and moment > now - _QUIET
        ]  # fmt: skip
        if not near:
            return
        server.clock.sleep((max(near) + _QUIET - now).total_seconds())


def _stop(server: Server, one: Found) -> None:
    with contextlib.suppress(Missing):  # somebody else, who applied at the same moment, has deleted it
        server.call(f"stop the schedule {one.name}", lambda client: client.disable_recurring_run(one.id))


def _wake(server: Server, one: Found) -> None:
    server.call(f"wake the schedule {one.name}", lambda client: client.enable_recurring_run(one.id))


def _retire(server: Server, found: Iterable[Found]) -> str:
    """Deletes those of which nothing runs: the server kills the runs of one that is deleted."""
    found, kept = tuple(found), 0
    for one in found:
        if _in_flight(server, one):
            kept += 1
            continue
        try:
            server.call(f"delete the schedule {one.name}", lambda client, one=one: client.delete_recurring_run(one.id))
        except Missing:  # an earlier try's answer was lost, or somebody else was first
            continue
    if kept:
        return f"; {kept} of the old ones has runs in flight: it is stopped, and a later apply deletes it"
    return "; the old one is deleted" if found else ""


def _in_flight(server: Server, one: Found) -> bool:
    return any(run.state in kubeflow.IN_FLIGHT for run in runs_of(server, [one]))


def runs_of(server: Server, found: Sequence[Found]) -> Iterator[Any]:
    """The runs that recurring runs started, newest first in each group; the server cannot be asked for them alone."""
    ids, oldest = {one.id for one in found}, min(one.created_at for one in found)
    for experiment_id in sorted({one.experiment_id for one in found if one.experiment_id}):
        for run in kubeflow.runs(server, experiment_id):
            if run.created_at < oldest:
                break
            if run.recurring_run_id in ids:
                yield run
