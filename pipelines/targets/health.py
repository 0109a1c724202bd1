"""How a pipeline's schedules fare on the server: the newest runs of each, and whether one is late or keeps failing."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pipelines.config import Config
from pipelines.cron import parse_server_cron, zone_of
from pipelines.targets import kubeflow
from pipelines.targets.access import Server
from pipelines.targets.schedules import Found, Wanted, runs_of

_UTC = zone_of("UTC")


@dataclass(frozen=True)
class Health:
    """How a schedule fares."""

    name: str
    state: str
    """`running`, `paused`, `missing`, `disabled` (by the file) or `changed` (the server's differs from the file)."""
    next_at: datetime | None
    last: kubeflow.Ended | None
    late_since: datetime | None
    """The moment at which a run should have started and did not."""
    failures_in_a_row: int
    ok: bool


def health(
    server: Server, config: Config, wanted: Wanted, found: Sequence[Found], grace: timedelta, failures: int
) -> Health:
    """Looks at the newest runs of one schedule."""
    mine = [one for one in found if one.owner == config.kubeflow.owner and one.name == wanted.name]
    live = [one for one in mine if one.enabled]
    if not mine:
        state = "missing" if wanted.enabled else "disabled"
        return Health(wanted.name, state, None, None, None, 0, not wanted.enabled)
    now = server.clock.now()
    runs = sorted(runs_of(server, mine), key=lambda run: run.created_at, reverse=True)
    ended = [run for run in runs if run.state in kubeflow.ENDED]
    in_a_row = len(list(itertools.takewhile(lambda run: run.state == "FAILED", ended)))
    state, next_at, late = "paused" if wanted.enabled else "disabled", None, None
    if live:
        state = "running" if live[0].spec == wanted.spec else "changed"
        next_at = next(parse_server_cron(live[0].cron).moments(max(now, live[0].start or now), _UTC), None)
        late = _late(live[0], runs, now, grace)
    last = kubeflow.describe(runs[0], config) if runs else None
    # One that is to stand still, and does, is well whatever its last runs were.
    ok = (late is None and in_a_row < failures and bool(live)) or state == "disabled"
    return Health(wanted.name, state, next_at, last, late, in_a_row, ok)


def _late(live: Found, runs: Sequence[Any], now: datetime, grace: timedelta) -> datetime | None:
    due = parse_server_cron(live.cron).last_before(now - grace, _UTC)
    end = live.raw.trigger.cron_schedule.end_time
    if due is None or due <= (live.start or live.created_at) or (end is not None and due > end):
        return None
    busy = [run for run in runs if run.state in kubeflow.IN_FLIGHT]
    if len(busy) >= int(live.raw.max_concurrency or 1):
        return None
    started = [max(run.created_at, run.scheduled_at or run.created_at) for run in runs]
    return None if any(moment >= due for moment in started) else due
