"""What can be known before a run is paid for, each finding with its remedy.

for finding in check(config):
    print(finding.state, finding.subject, finding.message)
"""

import contextlib
import json
import secrets
import shlex
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.config import Config
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, BadInput, TriremeError

if TYPE_CHECKING:
    from pipelines.targets.access import Server


_SUBJECTS = {"data.name": "builder", "train.model": "model", "train.optimizer": "optimizer"}


class Finding(NamedTuple):
    """One thing that was looked at."""

    state: str
    """`passed`, `warning` or `failed`."""
    subject: str
    """What was looked at."""
    message: str
    """What was found and, where it is not well, what to do."""
    exit_code: int = EXIT_DONE
    """Of `failed`: 2 where something that a person gave has to change, 1 where the world failed while we looked."""


def check(config: Config, *, is_for_cluster: bool = False) -> list[Finding]:
    """Looks at the names, the dataset, the schema and the image of a configuration that is valid in itself.

    Args:
        config: The configuration.
        is_for_cluster: Whether the tasks run in the image alone, which may have modules that are not here.
    """
    own = list(_own(config, is_for_cluster=is_for_cluster))
    # A builder that cannot be imported is no dataset, and a second import would take as long as the first.
    has_builder = all(finding.state == "passed" for finding in own if finding.subject == _SUBJECTS["data.name"])
    return [
        Finding("passed", "configuration", f"{config.name}: every setting is valid and they fit one another"),
        *own,
        *([_dataset(config)] if has_builder else []),
        *_warm_start(config),
        *_schema(config),
        _image(config),
        _code(config),
    ]


def exit_code_of(findings: Iterable[Finding]) -> int:
    """2 where anything has to change, else 1 where anything could not be looked at, else 0: as a run would end."""
    return max((finding.exit_code for finding in findings), default=EXIT_DONE)


def _refused(subject: str, message: str) -> Finding:
    return Finding("failed", subject, message, EXIT_BAD_INPUT)


def _failed(subject: str, error: TriremeError) -> Finding:
    return Finding("failed", subject, str(error), EXIT_BAD_INPUT if isinstance(error, BadInput) else EXIT_FAILED)


def _own(config: Config, *, is_for_cluster: bool) -> Iterator[Finding]:
    """Whether a person's own names lead to something that can be called as it will be."""
    from trainer.own_trial import try_own

    for trial in try_own(config.data, config.train, config.evaluate):
        subject = _SUBJECTS.get(trial.setting) or ("metric" if "own_metrics" in trial.setting else "slice")
        if trial.fault is None:
            shown = f"{trial.setting} = {json.dumps(trial.value)}"
            yield Finding("passed", subject, f"{shown} is there and takes what it will be given")
        elif trial.is_missing and is_for_cluster:
            yield Finding("warning", subject, f"{trial.fault}; {config.cluster.image} must have it")
        else:
            yield _refused(subject, trial.fault)


def _warm_start(config: Config) -> Iterator[Finding]:
    """Whether there are weights to begin with."""
    if config.train.warm_start is None:
        return
    from trainer.warm_start import check_source

    try:
        check_source(config.train.warm_start)
    except TriremeError as error:
        yield _failed("warm start", error)
    else:
        yield Finding("passed", "warm start", f"{config.train.warm_start.source} holds weights")


def _dataset(config: Config) -> Finding:
    """Whether the builder or the files exist, are at hand, and have the splits and columns that are asked of them.

    Reads metadata, and of a table's first file the first rows.
    """
    from trainer.data.sources import open_source
    from trainer.data.tfds_source import describe_builder

    if config.data.source != "tfds":
        return _files(config)
    try:
        description = describe_builder(config.data)
        if description.prepared:
            open_source(config.data, None)
    except TriremeError as error:
        return _failed("dataset", error)
    if not description.prepared and config.data.download:
        return Finding("warning", "dataset", f"{description.full_name} will be fetched into {description.folder}")
    if not description.prepared:
        return _refused("dataset", f"{description.full_name} is not in {description.folder}; set data.download")
    return Finding("passed", "dataset", f"{description.full_name} is in {description.folder}")


def _files(config: Config) -> Finding:
    from datetime import UTC

    from trainer import storage
    from trainer.data.fingerprint import wanted_files
    from trainer.data.sources import open_source
    from trainer.data.window import days_of

    data = config.data
    try:
        found = wanted_files(data.path, data.window)
        if found and not storage.is_remote(data.path):
            open_source(data, None)
    except TriremeError as error:
        return _failed("dataset", error)
    window = ""
    if data.window is not None:
        days = days_of(data.window, datetime.now(UTC))
        rows = f", rows by {data.window.column}" if data.window.column else ""
        window = f"{rows} of {days[0]} to {days[-1]}"
    if not found:
        return _refused("dataset", f"data.path = {data.path}: there are no files{window}")
    return Finding("passed", "dataset", f"{data.path}: {len(found):,} file{'s' if len(found) > 1 else ''}{window}")


def _schema(config: Config) -> Iterator[Finding]:
    """Whether the file that the data is to be validated with can be read and is a schema."""
    if config.validate_data is None or config.validate_data.schema_file is None:
        return
    from pipelines.training import schema_text

    try:
        schema_text(config)
    except BadInput as error:
        yield _failed("schema", error)
    else:
        yield Finding("passed", "schema", f"{config.validate_data.schema_file} can be read")


def _image(config: Config) -> Finding:
    image = config.cluster.image
    name, _, tag = image.rpartition("/")[2].partition(":")
    if "@sha256:" in image:
        return Finding("passed", "image", f"{image} is fixed by its digest")
    if tag in ("", "latest"):
        return _refused("image", f"cluster.image = {image}: names no fixed version; give a tag or a digest")
    return Finding("passed", "image", f"{name} has the tag {tag}")


def _code(config: Config) -> Finding:
    """Whether the image holds this checkout's code, where a Docker engine here has the image."""
    from pipelines.targets.containers import code_remark, connect, image_labels

    image = config.cluster.image
    try:
        with contextlib.closing(connect("start one to have it compared")) as engine:
            labels = image_labels(engine, image)
    except TriremeError as error:
        return Finding("passed", "code", f"not compared with the image's: {error}")
    if labels is None:
        return Finding("passed", "code", f"not compared with the image's: the Docker engine here does not have {image}")
    if remark := code_remark(labels):
        return Finding("warning", "code", f"{image} {remark}")
    return Finding("passed", "code", f"{image} holds the code of this checkout")


def check_cluster(config: Config, now: datetime, connect: Callable[[], "Server"]) -> list[Finding]:
    """Looks at what a run on a cluster needs besides: the root, the hardware, the schedules and the server.

    Args:
        config: A configuration that is valid in itself.
        now: The moment, for the schedules.
        connect: Gives the way to the server; what it raises becomes a finding.
    """
    return [
        *_root(config),
        *_hardware(config),
        *_launcher(config),
        *_schedules(config, now),
        *_server(config, connect),
    ]


def _root(config: Config) -> Iterator[Finding]:
    """Whether things can be written to and read from the root, with the account of whoever asks."""
    from trainer import storage

    root = config.cluster.pipeline_root
    if root is None:
        yield _refused("root", "cluster.pipeline_root = null: name one, such as gs://bucket/trireme")
        return
    if "://" not in root and not any(
        root == one.path or root.startswith(f"{one.path}/") for one in config.cluster.volumes
    ):
        yield _refused(
            "root",
            f"{root} is a folder in each pod by itself; take a bucket, or mount a claim there (cluster.volumes)",
        )
        return
    if not storage.is_remote(root):
        yield Finding("warning", "root", f"{root} can be looked at from inside the cluster only")
        return
    probe = storage.join(root, "checks", secrets.token_hex(8))
    try:
        storage.write_json(storage.join(probe, "probe.json"), {"probe": True})
        storage.read_json(storage.join(probe, "probe.json"))
        storage.delete_prefix(probe)
    except TriremeError as error:
        yield _failed("root", error)
        return
    yield Finding("passed", "root", f"{root} can be read and written by you")
    yield Finding(
        "warning",
        "account",
        "whether the runs' account may read and write there too shows inside the cluster only:"
        f" {_probe_of_the_runs_account(config, root)}",
    )


def _probe_of_the_runs_account(config: Config, root: str) -> str:
    """A command that does in a pod with the account of the runs what `check` did here."""
    place = f"{root.rstrip('/')}/checks/account"
    deed = f"from trainer import storage as s; s.write_json('{place}', 1); s.read_json('{place}'); s.delete_prefix('{place}')"
    pod = {"spec": {"serviceAccountName": config.cluster.service_account or "pipeline-runner"}}
    words = [
        *("kubectl", "-n", config.kubeflow.namespace or "kubeflow", "run", "trireme-check", "--rm", "-i"),
        *("--restart=Never", f"--image={config.cluster.image}", f"--overrides={json.dumps(pod)}"),
        *("--command", "--", "python", "-c", deed),
    ]
    return shlex.join(words)


def _hardware(config: Config) -> Iterator[Finding]:
    """Whether batch, replicas, GPUs and workers fit one another; the number of shards fits any of them."""
    gpus, strategy, batch = config.cluster.num_gpus, config.train.strategy, config.train.global_batch_size
    workers = config.cluster.num_workers
    replicas = workers * (gpus or config.train.num_virtual_devices or 1)
    gpus_said = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "the CPU"
    place = f"{workers} workers with {gpus_said} each" if workers > 1 else gpus_said
    if config.cluster.num_parameter_servers:
        yield Finding("passed", "hardware", f"{strategy} on {place}, each at its own pace")
    elif batch < replicas:
        yield _refused(
            "hardware",
            f"train.global_batch_size = {batch}: is less than one example for each of {replicas} replicas ({place});"
            " give a larger batch or fewer of them",
        )
    elif batch % replicas:
        yield Finding(
            "warning",
            "hardware",
            f"a batch of {batch} does not divide by {replicas} replicas ({place}), so some wait for the others; take"
            f" {batch - batch % replicas} or {batch + replicas - batch % replicas}",
        )
    elif replicas == 1:
        yield Finding("passed", "hardware", f"{strategy} on {place}")
    else:
        yield Finding("passed", "hardware", f"{strategy} on {place}, {batch // replicas} examples for each replica")
    if workers > 1:
        yield Finding(
            "passed", "shards", f"each of {workers} workers takes its part of every batch, however many files there are"
        )
    if gpus and not config.cluster.memory:
        yield Finding("warning", "memory", "cluster.memory = null: a node may kill the training for want of it")
    if gpus > 1 and not config.cluster.shared_memory and config.cluster.launcher == "local":
        yield Finding(
            "warning", "memory", "cluster.shared_memory = null: NCCL may fail with 64 MiB of /dev/shm; give 1Gi or more"
        )


def _launcher(config: Config) -> Iterator[Finding]:
    """What a training of many pods needs of the cluster, as far as it can be known from here."""
    cluster = config.cluster
    job = cluster.job()
    if job is None:
        if cluster.is_several:
            yield Finding(
                "warning", "launcher", "cluster.launcher = local: all processes share one pod; trainjob gives each its own"
            )  # fmt: skip
        return
    needs = f"the runtime {job.runtime} and " if job.launcher == "trainjob" else ""
    account = cluster.service_account or "pipeline-runner"
    size = "1 pod" if cluster.num_pods == 1 else f"{cluster.num_pods} pods"
    yield Finding(
        "passed", "launcher", f"a {job.launcher} of {size}; the cluster needs {needs}the role of"
        f" manifests/launcher-rbac.yaml for {account}",
    )  # fmt: skip
    if cluster.timeout_secs is None:
        days = job.deadline_secs // 86400
        yield Finding(
            "warning", "launcher", f"cluster.timeout_secs = null: a job whose launcher is lost ends after {days} days only"
        )  # fmt: skip
    if cluster.retries == 0:
        yield Finding(
            "warning", "launcher", "cluster.retries = 0: nobody takes up the job of a launcher whose node is lost; give 1"
        )  # fmt: skip


def _schedules(config: Config, now: datetime) -> Iterator[Finding]:
    from pipelines.cron import parse_cron, preview, zone_of
    from pipelines.moments import coincidences, translated

    for sentence in coincidences(config, now):
        yield Finding("warning", "schedule", sentence)
    for name, schedule in config.schedules.items():
        try:
            translated(name, schedule, now)
        except BadInput as error:
            yield _failed("schedule", error)
            continue
        zone = zone_of(schedule.timezone)
        following = preview(parse_cron(schedule.cron), zone, max(now, schedule.start_time or now), 1)[0]
        offsets = {(now + timedelta(days=days)).astimezone(zone).utcoffset() for days in range(0, 366, 30)}
        message = f"{name} runs next at {following.at.astimezone(zone):%Y-%m-%d %H:%M %Z}"
        if len(offsets) > 1:
            yield Finding(
                "warning",
                "schedule",
                f"{message}; after each change of the clocks, apply it again (schedule diff says so)",
            )
        else:
            yield Finding("passed", "schedule", message)


def _server(config: Config, connect: Callable[[], "Server"]) -> Iterator[Finding]:
    """Whether it answers, what it is, and whether each thing that we use of it works; probed, not concluded from a version."""
    try:
        server = connect()
        health = server.call("say how it is", lambda client: client.get_kfp_healthz(), attempts=2)
    except TriremeError as error:
        yield _failed("server", error)
        return
    yield Finding("passed", "server", f"{server.access.host} answers; version {_version(server)}")
    namespace = server.access.namespace
    if health.multi_user and not namespace:
        yield _refused("namespace", "the server keeps users apart; give --namespace or kubeflow.namespace")
        return
    if namespace and not health.multi_user:
        yield Finding("warning", "namespace", f"the server does not keep users apart; {namespace} means nothing to it")
    probes: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("pipelines", lambda client: client.list_pipelines(page_size=1, namespace=namespace)),
        ("experiments", lambda client: client.list_experiments(page_size=1, namespace=namespace)),
        ("runs", lambda client: client.list_runs(page_size=1, namespace=namespace)),
        ("schedules", lambda client: client.list_recurring_runs(page_size=1, namespace=namespace)),
    )
    for name, probe in probes:
        try:
            server.call(f"list {name}", probe, attempts=2)
        except TriremeError as error:
            yield _failed(name, error)
        else:
            yield Finding("passed", name, "can be listed")


def _version(server: "Server") -> str:
    """What the server says of itself at the older address; the newer has no version."""

    def ask(client: Any) -> Any:
        api = client._run_api.api_client
        return api.call_api("/apis/v1beta1/healthz", "GET", response_type="object", auth_settings=["Bearer"],
                            header_params={"Accept": "application/json"}, _return_http_data_only=True)  # fmt: skip

    try:
        found = server.call("say its version", ask, attempts=1)
    except TriremeError:
        return "unknown"
    return str(found.get("tag_name") or found.get("commit_sha") or "unknown") if isinstance(found, dict) else "unknown"
