"""Who am I among whom: one checked description of the cluster, whatever told us of it.

`describe` reads the environment, `ClusterDescription` is what the rest of the trainer sees, and the two functions at
the end make TensorFlow notice a dead or frozen peer in time and say its name. TensorFlow is imported in the one that
sets it up only: a wrong description must be refused in milliseconds, before anything heavy is loaded.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import BadInput, WorldFailure

DEFAULT_PORT = 2222
"""The port that TFJob and Vertex use; ours too where a JobSet gives names only."""

HEARTBEAT_TIMEOUT_SECS = 10.0
"""Silence after which a peer counts as lost. Measured: the group ends 4 s (killed) to 11 s (frozen) later."""

LOST_PEER = "lost its peer"
"""These words are in every message that only echoes another process's fault; launchers look for them."""

ECHOES = (LOST_PEER, "Collective ops is aborted", "CoordinationService", "coordination service", "heartbeat timeout")
"""Words by which a launcher knows that a process died of a peer's fault and not of its own."""

# The spellings in the wild: `master` is TensorFlow 1 and TFJob, workerpoolN is Vertex's CLUSTER_SPEC.
_TASK_TYPES = {
    "chief": "chief",
    "master": "chief",
    "worker": "worker",
    "ps": "ps",
    "evaluator": "evaluator",
    "workerpool0": "chief",
    "workerpool1": "worker",
    "workerpool2": "ps",
    "workerpool3": "evaluator",
}
_NAMES = {"chief": "chief", "worker": "worker", "ps": "parameter server", "evaluator": "evaluator"}


def member_name(task_type: str, task_index: int) -> str:
    """Returns what people and logs call a process: `chief`, `worker 1`, `parameter server 0`."""
    return _NAMES[task_type] if task_type in ("chief", "evaluator") else f"{_NAMES[task_type]} {task_index}"


@dataclass(frozen=True, kw_only=True)
class ClusterDescription:
    """The processes that train together, and which one this is.

    Without parameter servers every process trains and a separate chief of the source is put in front of the workers,
    so that worker 0 is always the chief. With parameter servers the chief coordinates and does not train; where the
    source names none, its first worker becomes it. All processes of a group apply the same rule and so agree.

    Attributes:
        workers: `host:port` of the processes that train, in order.
        parameter_servers: `host:port` of the parameter servers, in order.
        chief: `host:port` of the coordinating process; None without parameter servers, where it is `workers[0]`.
        evaluator: `host:port` of the evaluator, or None. It stands beside the group and never holds it up.
        task_type: what this process is: `chief`, `worker`, `ps` or `evaluator`.
        task_index: which one of its kind, from 0.
        source: the environment variable that told us, for messages.
    """

    workers: tuple[str, ...]
    parameter_servers: tuple[str, ...] = ()
    chief: str | None = None
    evaluator: str | None = None
    task_type: str
    task_index: int
    source: str = "TF_CONFIG"

    @property
    def num_workers(self) -> int:
        """How many processes train."""
        return len(self.workers)

    @property
    def num_parameter_servers(self) -> int:
        """How many processes hold variables for the others."""
        return len(self.parameter_servers)

    @property
    def chief_address(self) -> str:
        """`host:port` of the process that decides, saves and speaks."""
        return self.chief or self.workers[0]

    @property
    def is_chief(self) -> bool:
        """Whether this process decides, saves and speaks for the group."""
        return (self.task_type, self.task_index) == self.leader

    @property
    def leader(self) -> tuple[str, int]:
        """Task type and index of the chief."""
        return ("chief", 0) if self.chief else ("worker", 0)

    @property
    def name(self) -> str:
        """What people and logs call this process."""
        return member_name(self.task_type, self.task_index)

    @property
    def address(self) -> str | None:
        """`host:port` where this process listens; None for an evaluator outside the cluster."""
        if self.task_type == "evaluator":
            return self.evaluator
        return self.members[self.task_type, self.task_index]

    @property
    def members(self) -> dict[tuple[str, int], str]:
        """Task type and index to `host:port` of all that must be there before training starts; chief first."""
        chief = {("chief", 0): self.chief} if self.chief else {}
        workers = {("worker", i): address for i, address in enumerate(self.workers)}
        servers = {("ps", i): address for i, address in enumerate(self.parameter_servers)}
        return chief | workers | servers

    def to_tf_config(self) -> dict[str, Any]:
        """Returns the description in TensorFlow's own form, for a `ClusterResolver` or a child's TF_CONFIG."""
        cluster: dict[str, list[str]] = {"worker": list(self.workers)}
        if self.chief:
            cluster["chief"] = [self.chief]
        if self.parameter_servers:
            cluster["ps"] = list(self.parameter_servers)
        if self.evaluator:
            cluster["evaluator"] = [self.evaluator]
        return {"cluster": cluster, "task": {"type": self.task_type, "index": self.task_index}}


def describe(environ: Mapping[str, str]) -> ClusterDescription | None:
    """Returns the cluster that the environment describes, or None when this process is alone.

    Looked at in this order; the first that speaks of anybody wins: `TF_CONFIG` (people, TFJob, Vertex, our local
    launcher), `CLUSTER_SPEC` (Vertex), and `TRIREME_JOBSET_NAME` with its companions (our JobSet and TrainJob pods).

    Args:
        environ: environment variables, usually `os.environ`.

    Raises:
        BadInput: the description cannot be right; the message holds the variable, the value and the rule.
    """
    for variable in ("TF_CONFIG", "CLUSTER_SPEC"):
        text = environ.get(variable, "").strip()
        if text and (found := _from_json(variable, text, environ)) is not None:
            return found if len(found.members) > 1 or found.evaluator or found.task_type == "evaluator" else None
    if environ.get("TRIREME_JOBSET_NAME", "").strip():
        found = _from_jobset(environ)
        return found if len(found.members) > 1 else None
    return None


def _refuse(where: str, value: object, rule: str) -> BadInput:
    return BadInput(f"{where} = {value!r}: {rule}")


def _from_json(variable: str, text: str, environ: Mapping[str, str]) -> ClusterDescription | None:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise _refuse(variable, text, f"must be JSON; {error}") from None
    if not isinstance(given, dict):
        raise _refuse(variable, text, 'must be an object such as {"cluster": {…}, "task": {…}}')
    if "sparseCluster" in given:
        cluster = _fill_sparse(variable, given, environ)
    else:
        cluster = given.get("cluster") or {}
    if not isinstance(cluster, dict):
        raise _refuse(f"{variable}.cluster", cluster, 'must be an object such as {"worker": ["host:port", …]}')
    jobs: dict[str, tuple[str, list[str]]] = {}
    for job, addresses in cluster.items():
        where = f"{variable}.cluster.{job}"
        task_type = _task_type(where, job)
        listed = _addresses(where, addresses)
        if not listed:
            continue
        if task_type in jobs:
            raise _refuse(where, listed, f"stands beside {jobs[task_type][0]!r}; one group has one {_NAMES[task_type]}")
        jobs[task_type] = (job, listed)
    if not jobs:
        return None
    task = given.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        rule = 'must say which process this is, such as {"type": "worker", "index": 0}'
        raise _refuse(f"{variable}.task", task, rule)
    task_type = _task_type(f"{variable}.task.type", task["type"])
    task_index = _whole_number(f"{variable}.task.index", task["index"])
    return _checked(variable, {kind: listed for kind, (_, listed) in jobs.items()}, task_type, task_index)


def _task_type(where: str, given: object) -> str:
    if not isinstance(given, str) or given not in _TASK_TYPES:
        raise _refuse(where, given, f"must be one of {', '.join(_TASK_TYPES)}")
    return _TASK_TYPES[given]


def _whole_number(where: str, given: object) -> int:
    # TFJob writes 1, hand-written shell scripts "1"; True would pass for an int.
    if isinstance(given, bool) or not isinstance(given, int | str) or not re.fullmatch(r"\d{1,9}", str(given)):
        raise _refuse(where, given, "must be a whole number from 0")
    return int(given)


def _addresses(where: str, given: object) -> list[str]:
    """Reads `["host:port", …]`, one bare `"host:port"`, or TensorFlow's `{"0": "host:port", …}`."""
    if isinstance(given, str):
        given = [given]
    if isinstance(given, dict):
        numbered = {_whole_number(f"{where} index", key): address for key, address in given.items()}
        if missing := sorted(set(range(len(numbered))) - set(numbered)):
            rule = f"must number its addresses from 0 without a hole; {missing[0]} is missing"
            raise _refuse(where, given, rule)
        given = [numbered[i] for i in range(len(numbered))]
    if not isinstance(given, list):
        raise _refuse(where, given, 'must be a list such as ["host:port", …]')
    return [_address(f"{where}[{i}]", address) for i, address in enumerate(given)]


def _address(where: str, given: object) -> str:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\d+)", given) if isinstance(given, str) else None
    if not match:
        raise _refuse(where, given, "must be host:port, such as trainer-worker-0.trainer:2222 or [::1]:2222")
    if not 1 <= int(match[2]) <= 65535:
        raise _refuse(where, given, f"port {match[2]} must be from 1 to 65535")
    return str(given)


def _checked(
    source: str, jobs: dict[str, list[str]], task_type: str, task_index: int, roles: Mapping[str, str] | None = None
) -> ClusterDescription:
    """Holds one description against the rules and gives it the one form described in `ClusterDescription`."""
    where = f"{source}.cluster" if roles is None else source
    chief, workers, servers, evaluators = (jobs.get(kind, []) for kind in ("chief", "worker", "ps", "evaluator"))
    for kind in ("chief", "evaluator"):
        if len(jobs.get(kind, [])) > 1:
            raise _refuse(f"{where}.{kind}", jobs[kind], f"there can be one {kind} only")
    seen: dict[str, tuple[str, int]] = {}
    for kind, listed in jobs.items():
        for i, address in enumerate(listed):
            if (other := seen.setdefault(address.lower(), (kind, i))) != (kind, i):
                hint = "; an evaluator does not train" if "evaluator" in (kind, other[0]) else ""
                rule = f"is also {other[0]}[{other[1]}]; every process has an address of its own{hint}"
                raise _refuse(f"{where}.{kind}[{i}]", address, rule)
    count = len(jobs.get(task_type, []))
    if task_type == "evaluator" and not evaluators:
        count = 1  # TensorFlow lets the evaluator be left out of the cluster that it watches
    if count == 0:
        raise _refuse(f"{source}.task.type", task_type, f"the cluster has {', '.join(jobs)} only")
    if task_index >= count:
        rule = f"must be from 0 to {count - 1}: the cluster has {count} of {_NAMES[task_type]}"
        raise _refuse(f"{source}.task.index", task_index, rule)
    if servers and not chief and workers:
        chief, workers = workers[:1], workers[1:]
        if task_type == "worker":
            task_type, task_index = ("chief", 0) if task_index == 0 else ("worker", task_index - 1)
    elif chief and not servers:
        workers, chief = chief + workers, []
        if task_type in ("chief", "worker"):
            task_type, task_index = "worker", (0 if task_type == "chief" else task_index + 1)
    if servers and not (chief and workers):
        given = {kind: len(listed) for kind, listed in jobs.items()}
        raise _refuse(where, given, "parameter servers need a chief that coordinates and at least one worker beside it")
    if not workers:
        raise _refuse(where, jobs, "must name at least one worker")
    return ClusterDescription(
        workers=tuple(workers),
        parameter_servers=tuple(servers),
        chief=chief[0] if chief else None,
        evaluator=evaluators[0] if evaluators else None,
        task_type=task_type,
        task_index=task_index,
        source=source,
    )


def _number_from(environ: Mapping[str, str], variable: str, default: int | None = None) -> int:
    text = environ.get(variable, "").strip()
    if not text and default is not None:
        return default
    return _whole_number(variable, text)


def _fill_sparse(variable: str, given: dict[str, Any], environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Completes TFJob's sparse form (`enableDynamicWorker`), which tells a process of itself and no fellow worker.

    Its hosts are numbered (`job-worker-0.namespace.svc:2222`), so the number of workers is all that is missing.
    """
    where, sparse, task = f"{variable}.sparseCluster", given["sparseCluster"], given.get("task")
    task_type = task.get("type") if isinstance(task, dict) else None
    mine = (sparse.get(task_type) or {}) if isinstance(sparse, dict) and isinstance(task_type, str) else {}
    own = next(iter(mine.values() if isinstance(mine, dict) else mine), None)
    if not isinstance(own, str) or f"-{task_type}-" not in own:
        raise _refuse(
            where, sparse, "must name this process itself, with a host such as job-worker-0.namespace.svc:2222"
        )
    if not environ.get("TRIREME_NUM_WORKERS", "").strip():
        rule = "does not tell how many workers there are: set enableDynamicWorker to false, or TRIREME_NUM_WORKERS"
        raise _refuse(where, sparse, rule)
    num_servers = _number_from(environ, "TRIREME_NUM_PARAMETER_SERVERS", len(sparse.get("ps") or []))
    counts = {"worker": _number_from(environ, "TRIREME_NUM_WORKERS"), "ps": num_servers}
    head, _, tail = own.rpartition(f"-{task_type}-")
    tail = tail.lstrip("0123456789")
    return {kind: [f"{head}-{kind}-{i}{tail}" for i in range(number)] for kind, number in counts.items()}


def _from_jobset(environ: Mapping[str, str]) -> ClusterDescription:
    """Builds the addresses from a JobSet's stable host names, `<set>-<job>-0-<index>.<set>`.

    The set's name and the numbers come in by our own variables, because no operator puts them into a pod.
    """
    source, name = "TRIREME_JOBSET_NAME", environ["TRIREME_JOBSET_NAME"].strip()
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        raise _refuse(source, name, "must be the JobSet's name: small letters, digits and dashes")
    job = environ.get("TRIREME_REPLICATED_JOB", "node").strip()
    index = _number_from(environ, "JOB_COMPLETION_INDEX")
    port = _number_from(environ, "TRIREME_PORT", DEFAULT_PORT)
    num_workers = _number_from(environ, "TRIREME_NUM_WORKERS")
    num_servers = _number_from(environ, "TRIREME_NUM_PARAMETER_SERVERS", 0)
    if not 1 <= port <= 65535:
        raise _refuse("TRIREME_PORT", port, "must be from 1 to 65535")
    if num_workers < 1:
        raise _refuse("TRIREME_NUM_WORKERS", num_workers, "must be at least 1")

    def hosts(replicated_job: str, first: int, number: int) -> list[str]:
        return [f"{name}-{replicated_job}-0-{i}.{name}:{port}" for i in range(first, first + number)]

    if job == "node":  # one indexed job: equal workers, or chief, workers and parameter servers in this order
        num_chiefs = 1 if num_servers else 0
        first_server = num_chiefs + num_workers
        total = first_server + num_servers
        if index >= total:
            raise _refuse(
                "JOB_COMPLETION_INDEX", index, f"must be from 0 to {total - 1}: the group has {total} processes"
            )
        jobs = {"chief": hosts(job, 0, num_chiefs), "worker": hosts(job, num_chiefs, num_workers)}
        jobs["ps"] = hosts(job, first_server, num_servers)
        starts = {"chief": 0, "worker": num_chiefs, "ps": first_server}
        task_type = max(
            (kind for kind in starts if jobs[kind] and starts[kind] <= index), key=lambda kind: starts[kind]
        )
        task_index = index - starts[task_type]
    elif job in ("chief", "worker", "ps"):  # a replicated job for each kind
        jobs = {
            "chief": hosts("chief", 0, 1),
            "worker": hosts("worker", 0, num_workers),
            "ps": hosts("ps", 0, num_servers),
        }
        task_type, task_index = job, index
        if index >= len(jobs[job]):
            rule = f"must be below {len(jobs[job])}, the number of pods of replicated job {job!r}"
            raise _refuse("JOB_COMPLETION_INDEX", index, rule)
    else:
        raise _refuse("TRIREME_REPLICATED_JOB", job, "must be node, chief, worker or ps")
    return _checked(source, {kind: listed for kind, listed in jobs.items() if listed}, task_type, task_index, roles={})


def configure_collective_timeouts(
    description: ClusterDescription,
    *,
    heartbeat_timeout_secs: float = HEARTBEAT_TIMEOUT_SECS,
    register_timeout_secs: float = 120.0,
) -> None:
    """Makes TensorFlow end a synchronous group soon after one of its workers dies or freezes.

    Call it once, before any other TensorFlow operation and before the strategy is made. It does nothing under
    parameter servers, whose coordinator outlives a lost worker by design, nor for an evaluator.

    Args:
        description: who trains.
        heartbeat_timeout_secs: silence after which a worker counts as lost.
        register_timeout_secs: how long the strategy's constructor waits for the others. `wait_for_peers` has seen them
            all a moment before, so this covers the seconds that importing and set-up may differ by.

    Raises:
        RuntimeError: TensorFlow has already started, so that the setting would be ignored.
    """
    if description.parameter_servers or description.task_type == "evaluator" or description.num_workers < 2:
        return
    # No public function sets the heartbeat: tf.distribute's own default notices a frozen worker much later.
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.eager import context

    if context.context()._initialized:  # TensorFlow itself would only log a warning
        raise RuntimeError("configure_collective_timeouts must come before the first TensorFlow operation")
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=round(register_timeout_secs * 1000),
        heartbeat_timeout_in_ms=round(heartbeat_timeout_secs * 1000),
        # No barrier at the end: the chief exports for minutes after the others have rightly left.
        shutdown_barrier_timeout_in_ms=0,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=description.num_workers)],
    )


def explain_lost_peer(error: BaseException, description: ClusterDescription) -> WorldFailure | None:
    """Turns TensorFlow's report of a broken collective into one line with the lost worker's name.

    Args:
        error: what a training step raised.
        description: who trains.

    Returns:
        The failure to raise instead, or None when the error is this process's own.
    """
    text = str(error)
    kinds = ("UnavailableError", "DeadlineExceededError", "AbortedError", "CancelledError", "InternalError")
    if type(error).__name__ not in kinds or not any(words in text for words in ECHOES):
        return None
    found = re.findall(r"/job:(chief|worker|ps)/(?:replica:\d+/)?task:(\d+)", text)
    own = (description.task_type, description.task_index)
    lost = next((task for kind, i in found if (task := (kind, int(i))) != own and task in description.members), None)
    if lost is None and "CoordinationService" in text:
        lost = description.leader  # only the leader serves it, so a call that hangs means that the leader hangs
    if lost is None or lost == own:
        return WorldFailure(
            f"{description.name} {LOST_PEER}: TensorFlow does not say which; see the other logs. {text[-300:]}"
        )
    return WorldFailure(
        f"{description.name} {LOST_PEER}: {member_name(*lost)} ({description.members[lost]}) has died or stopped "
        f"answering. See its log for the cause; a restart of the whole group goes on from the last checkpoint."
    )
