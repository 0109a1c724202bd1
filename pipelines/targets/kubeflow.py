"""The compiled pipeline on a Kubeflow Pipelines server: upload, submit, watch, look back.

    uploaded = upload(server, config)            # a version named by its content; doing it again does nothing
    run = submit(server, Submission(config, …))
    ended = watch(server, run.run_id, show=print)

Every function may be called again after a failure: what exists is found, not made twice.
"""

import contextlib
import itertools
import json
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipelines.config import Config
from pipelines.targets.access import Server
from trainer import outcome, storage
from trainer.config import PLACE, parse_json
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, BadInput, TriremeError

ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
IN_FLIGHT = ("PENDING", "RUNNING", "CANCELING", "PAUSED")
_RECONNECTS = 60
T = TypeVar("T")
_IDENTIFIER = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PAGE_SIZE = 100
_PATIENCE_SECS = 5.0  # with a bucket that does not answer: the server has said the most of it already


class Uploaded(NamedTuple):
    """A version of the pipeline on the server."""

    pipeline_id: str
    version_id: str
    version: str
    """Name, from the content."""
    made: bool
    """Whether it was not there before."""
    newest: bool
    """Whether no other version was uploaded after it."""


def upload(server: Server, config: Config) -> Uploaded:
    """Compiles and uploads, as a version named by the digest of the compiled pipeline, which holds the source's digest."""
    with tempfile.TemporaryDirectory() as folder:
        package = compiled(config, Path(folder))
        name = version_name(package)
        pipeline_id = _find_pipeline(server, config.name) or _make_pipeline(server, config.name)
        found = _find_version(server, pipeline_id, name)
        made = found is None
        if made:
            found = _make_or_find(
                server,
                f"upload the version {name}",
                lambda client: client.upload_pipeline_version(
                    str(package), name, pipeline_id=pipeline_id, description=f"trireme: {config.name}"
                ),
                lambda: _find_version(server, pipeline_id, name),
            )
    newest = server.call(
        "list the versions",
        lambda client: client.list_pipeline_versions(pipeline_id, page_size=1, sort_by="created_at desc"),
    ).pipeline_versions
    is_newest = not newest or newest[0].pipeline_version_id == found.pipeline_version_id
    return Uploaded(pipeline_id, found.pipeline_version_id, name, made, is_newest)


def compiled(config: Config, folder: Path) -> Path:
    """The pipeline's YAML in a folder."""
    package = folder / "pipeline.yaml"
    package.write_bytes(_yaml(config.model_copy(update={"schedules": {}}).to_json()))
    return package


@lru_cache(maxsize=8)  # several schedules share one pipeline, and compiling is the slowest part of a command
def _yaml(config: str) -> bytes:
    from pipelines.training import compile_pipeline

    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "pipeline.yaml"
        compile_pipeline(parse_json(Config, config), package)
        return package.read_bytes()


def version_name(package: Path) -> str:
    """Name of a version: the beginning of its content's digest."""
    return f"sha256-{sha256(package.read_bytes()).hexdigest()[:16]}"


def copy_package(config: Config, prefix: str) -> str:
    """Stores the compiled pipeline under a prefix, by its digest, and returns where."""
    with tempfile.TemporaryDirectory() as folder:
        package = compiled(config, Path(folder))
        name = version_name(package)
        target = storage.join(prefix, config.name, name)
        if not storage.exists(target):
            with contextlib.suppress(storage.Conflict):  # another upload of the same content was first
                storage.publish(folder, target)
    return f"{target}/pipeline.yaml"


def link(server: Server, *parts: str) -> str:
    """Address of a page for people."""
    return f"{server.access.host}/#/{'/'.join(parts)}"


@dataclass(frozen=True)
class Submission:
    """A run to be started."""

    config: Config
    """With every override put in."""
    base: Config
    """Without: its pipeline is uploaded if the overrides are mere arguments of it."""
    root: str | None = None
    """Where data, checkpoints and models are. None: `cluster.pipeline_root`."""
    experiment: str | None = None
    """Group of runs. None: `kubeflow.experiment`, else the pipeline's name."""


def submit(server: Server, submission: Submission) -> Any:
    """Uploads what is not there yet and starts a run of it; returns kfp's run."""
    config = submission.config
    shape, arguments = arguments_of(config, submission.base)
    root = root_of(config, submission.root)
    arguments |= _places(config, shape, root)
    uploaded = upload(server, shape)
    name = f"{config.name}-{server.clock.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    experiment_id = find_experiment(server, submission.experiment or experiment_of(config), make=True)
    return start(server, name, experiment_id, uploaded.pipeline_id, uploaded.version_id, arguments, config, root)


def start(
    server: Server, name: str, experiment_id: str, pipeline_id: str, version_id: str | None,
    arguments: dict[str, Any], config: Config, root: str,
) -> Any:  # fmt: skip
    """Starts a run under a name that no other run has, so that it is found again if the answer is lost."""
    import kfp_server_api as api

    body = api.V2beta1Run(
        experiment_id=experiment_id,
        display_name=name,
        pipeline_version_reference=api.V2beta1PipelineVersionReference(
            pipeline_id=pipeline_id, pipeline_version_id=version_id
        ),
        runtime_config=api.V2beta1RuntimeConfig(parameters=arguments, pipeline_root=artifact_root(root)),
        service_account=config.cluster.service_account,
    )
    return server.make(
        f"start the run {name}",
        lambda client: client._run_api.run_service_create_run(run=body),
        lambda: next(runs(server, experiment_id, filter_=_equals("display_name", name)), None),
    )


def arguments_of(config: Config, base: Config) -> tuple[Config, dict[str, Any]]:
    """The configuration to compile, and the arguments that make its pipeline do what `config` says.

    Overrides of a step's section are arguments of the base's pipeline. Where they change the pipeline itself, as another
    image does, it is that of `config` and needs no arguments.
    """
    from pipelines.training import parameters_of

    if config == base:
        return base, {}
    wanted, given = parameters_of(config), parameters_of(base)
    changed = {key: value for key, value in wanted.items() if given.get(key) != value}
    if _skeleton(config) == _skeleton(base):
        return base, changed
    return config, {}


def _skeleton(config: Config) -> str:
    """The compiled pipeline without its parameters' defaults and its description."""
    import yaml

    with tempfile.TemporaryDirectory() as folder:
        documents = list(yaml.safe_load_all(compiled(config, Path(folder)).read_text(encoding="utf-8")))
    for parameter in documents[0]["root"]["inputDefinitions"]["parameters"].values():
        parameter.pop("defaultValue", None)
        parameter.pop("isOptional", None)
    documents[0]["pipelineInfo"].pop("description", None)
    return json.dumps(documents, sort_keys=True)


def root_of(config: Config, root: str | None) -> str:
    """Where the runs' data is.

    Raises:
        BadInput: Nobody says, or it is no place that pods share.
    """
    found = root or config.cluster.pipeline_root
    if found is None:
        raise BadInput(
            "cluster.pipeline_root = null: runs on a cluster need one, such as gs://bucket/trireme; or give --root"
        )
    if not (found.startswith("/") or (found.startswith("gs://") and re.fullmatch(PLACE, found))):
        raise BadInput(
            f"root = {found}: must be a bucket, such as gs://bucket/trireme, or the absolute path of a volume"
        )
    return found


def _places(config: Config, shape: Config, root: str) -> dict[str, Any]:
    from pipelines.training import places_of

    known = places_of(shape)
    return {key: value for key, value in places_of(config, root).items() if known.get(key) != value}


def artifact_root(root: str) -> str | None:
    """Where Kubeflow puts the artifacts. None: where the server always does."""
    return f"{root.rstrip('/')}/artifacts" if root.startswith("gs://") else None


def experiment_of(config: Config) -> str:
    """Name of the group of runs."""
    return config.kubeflow.experiment or config.name


def find_experiment(server: Server, name: str, make: bool = False) -> str | None:
    """Identifier of a group of runs."""
    import kfp_server_api as api

    namespace = server.access.namespace

    def find() -> str | None:
        found = server.call(
            "list the experiments",
            lambda client: client.list_experiments(namespace=namespace, filter=_equals("display_name", name)),
        )
        return found.experiments[0].experiment_id if found.experiments else None

    found = find()
    if found is None and make:
        body = api.V2beta1Experiment(display_name=name, namespace=namespace)
        found = _make_or_find(
            server,
            f"make the experiment {name}",
            lambda client: client._experiment_api.experiment_service_create_experiment(experiment=body).experiment_id,
            find,
        )
    return found


def runs(server: Server, experiment_id: str, filter_: str | None = None) -> Iterator[Any]:
    """The runs of a group, newest first, page by page."""
    token = ""
    while True:
        page = server.call(
            "list the runs",
            lambda client, token=token: client.list_runs(
                page_token=token,
                page_size=_PAGE_SIZE,
                sort_by="created_at desc",
                experiment_id=experiment_id,
                filter=filter_,
            ),
        )
        yield from page.runs or ()
        token = page.next_page_token
        if not token:
            return


def find_run(server: Server, config: Config, word: str, experiment: str | None = None) -> Any:
    """A run by its identifier, its name, the beginning of either, or `latest`.

    Raises:
        BadInput: There is none, or more than one.
    """
    experiment_id = find_experiment(server, experiment or experiment_of(config))
    listed: Iterator[Any] | list[Any] = runs(server, experiment_id) if experiment_id else []
    if word == "latest":
        found = list(itertools.islice(listed, 1))
    elif _IDENTIFIER.fullmatch(word):
        return server.call(f"show the run {word}", lambda client: client.get_run(word))
    else:
        listed = list(listed)
        exact = [run for run in listed if word in (run.run_id, run.display_name)]
        found = exact or [run for run in listed if run.run_id.startswith(word) or run.display_name.startswith(word)]
    if not found:
        raise BadInput(
            f"run = {word}: there is no such run in {experiment or experiment_of(config)}; see `trireme runs list`"
        )
    if len(found) > 1:
        raise BadInput(f"run = {word}: {len(found)} runs begin so; give more of the name")
    return server.call(f"show the run {found[0].run_id}", lambda client: client.get_run(found[0].run_id))


def cancel(server: Server, run: Any) -> bool:
    """Stops a run; False where it had ended."""
    if run.state in ENDED:
        return False
    server.call(f"cancel the run {run.run_id}", lambda client: client.terminate_run(run.run_id))
    return True


def retry(server: Server, run: Any) -> None:
    """Starts the failed tasks of a run again; those that succeeded keep their results.

    Raises:
        BadInput: The run has not failed and was not cancelled.
    """
    if run.state not in ("FAILED", "CANCELED"):
        raise BadInput(f"run = {run.run_id}: is {run.state}; only a run that failed or was cancelled can be retried")

    def restarted() -> Any | None:
        found = server.call("show the run", lambda client: client.get_run(run.run_id))
        return found if found.state in IN_FLIGHT else None

    server.make(
        f"retry the run {run.run_id}", lambda client: client._run_api.run_service_retry_run(run.run_id), restarted
    )


def watch(server: Server, run_id: str, show: Callable[[str], None], poll_secs: float = 5.0) -> Any:
    """Waits for the end of a run, says which task comes to which state, and reconnects when the connection is lost."""
    shown: dict[str, str] = {}
    while True:
        run = server.call(f"show the run {run_id}", lambda client: client.get_run(run_id), attempts=_RECONNECTS)
        for task in tasks_of(run):
            if shown.get(task["name"]) != task["state"] and task["state"] != "PENDING":
                shown[task["name"]] = task["state"]
                show(f"{task['name']:<16} {task['state'].lower()}" + (f": {task['error']}" if task["error"] else ""))
        if run.state in ENDED:
            return run
        server.clock.sleep(poll_secs)


def tasks_of(run: Any) -> list[dict[str, Any]]:
    """Name, state, seconds and error of each task, without what Kubeflow adds of its own."""
    found: dict[str, dict[str, Any]] = {}
    for detail in (run.run_details.task_details if run.run_details else None) or ():
        name = detail.display_name or ""
        own = name.endswith("-driver") or name in ("root", "executor", run.display_name)
        if not name or own or name.startswith(("condition-", "exit-handler-")):
            continue
        found[name] = {
            "name": name,
            "state": detail.state or "PENDING",
            "seconds": _seconds(detail.start_time, detail.end_time),
            "error": _first_line(detail.error.message) if detail.error else None,
        }
    return list(found.values())


@dataclass(frozen=True)
class Ended:
    """What is known of a run."""

    run_id: str
    name: str
    state: str
    created_at: datetime | None
    seconds: float | None
    verdict: str | None
    """`blessed`, `not_blessed`, `skipped`, or None where none was given or it cannot be read."""
    reasons: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    version: int | None = None
    """Of the model in the registry, if it was promoted."""
    error: str | None = None
    exit_code: int = EXIT_DONE
    unread: str | None = None
    """Why verdict and metrics could not be read, if they could not."""


def describe(run: Any, config: Config, root: str | None = None, unread: Mapping[str, str] = {}) -> Ended:
    """Puts together what the server and the run's root say of it.

    Args:
        run: kfp's run.
        config: The configuration, for the root where the run does not say it.
        root: In place of the configuration's.
        unread: Roots that are known not to answer, with the reason; they are not asked again.
    """
    place = root_in(run) or root or config.cluster.pipeline_root
    parts, reason = {}, unread.get(place) if place else None
    if place and reason is None:
        try:
            with storage.patience(_PATIENCE_SECS):
                parts = outcome.read(place, run.run_id)
        except TriremeError as error:
            reason = str(error).splitlines()[0]
    verdict, failure = parts.get("verdict") or {}, parts.get("failure") or {}
    error = None
    if run.state not in ("SUCCEEDED", "SKIPPED"):
        failed = [task for task in tasks_of(run) if task["state"] == "FAILED"]
        task, text = (failed[0]["name"], failed[0]["error"]) if failed else (None, None)
        task, text = failure.get("task") or task, failure.get("error") or text
        text = text or (_first_line(run.error.message) if run.error and run.error.message else None)
        error = ": ".join(part for part in (task, text) if part) or None
    code = {"SUCCEEDED": EXIT_DONE, "SKIPPED": EXIT_DONE, "CANCELED": EXIT_INTERRUPTED}.get(run.state, EXIT_FAILED)
    return Ended(
        run_id=run.run_id,
        name=run.display_name,
        state=run.state or "PENDING",
        created_at=run.created_at,
        seconds=_seconds(run.created_at, run.finished_at),
        verdict="skipped" if "skipped" in parts else verdict.get("verdict"),
        reasons=verdict.get("reasons") or ([parts["skipped"]["reason"]] if "skipped" in parts else []),
        metrics=verdict.get("metrics") or {},
        version=(parts.get("pushed") or {}).get("version"),
        error=error,
        exit_code=failure.get("exit_code", code) if run.state == "FAILED" else code,
        unread=reason,
    )


def root_in(run: Any) -> str | None:
    """Where a run's data is, if its arguments say it."""
    return ((run.runtime_config.parameters if run.runtime_config else None) or {}).get("root")


def describe_all(listed: Iterable[Any], config: Config) -> list[Ended]:
    """As `describe`, for several runs; a root that cannot be read is asked once."""
    rows: list[Ended] = []
    unread: dict[str, str] = {}
    for run in listed:
        row = describe(run, config, unread=unread)
        place = root_in(run) or config.cluster.pipeline_root
        if row.unread and place:
            unread[place] = row.unread
        rows.append(row)
    return rows


def _find_pipeline(server: Server, name: str) -> str | None:
    found = server.call(
        "list the pipelines",
        lambda client: client.list_pipelines(namespace=server.access.namespace, filter=_equals("display_name", name)),
    )
    return found.pipelines[0].pipeline_id if found.pipelines else None


def _make_pipeline(server: Server, name: str) -> str:
    import kfp_server_api as api

    # Uploading would name the first version after the pipeline; an empty pipeline leaves every name to its content.
    body = api.V2beta1Pipeline(display_name=name, namespace=server.access.namespace)
    return _make_or_find(
        server,
        f"make the pipeline {name}",
        lambda client: client._pipelines_api.pipeline_service_create_pipeline(pipeline=body).pipeline_id,
        lambda: _find_pipeline(server, name),
    )


def _make_or_find(server: Server, what: str, function: Callable[[Any], T], find: Callable[[], T | None]) -> T:
    """As `Server.make`, for what has one name: where somebody else was first, theirs is as good."""
    try:
        return server.make(what, function, find)
    except BadInput:
        found = find()
        if found is None:
            raise
        return found


def _find_version(server: Server, pipeline_id: str, name: str) -> Any | None:
    found = server.call(
        "list the versions",
        lambda client: client.list_pipeline_versions(pipeline_id, filter=_equals("display_name", name)),
    )
    return found.pipeline_versions[0] if found.pipeline_versions else None


def _equals(key: str, value: str) -> str:
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": key, "stringValue": value}]})


def _seconds(begin: datetime | None, end: datetime | None) -> float | None:
    # The server gives the year 1970 or 1 to what has not happened yet.
    return round((end - begin).total_seconds(), 1) if begin and end and end > begin else None


def _first_line(text: str | None) -> str | None:
    lines = (text or "").strip().splitlines()
    return lines[0][:300] if lines else None
