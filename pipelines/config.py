"""The root of the configuration: the steps' sections, the cluster, and the rules that cross sections.

    config = load_config(Path("configs/digits.yaml"), overrides=["train.epochs=3"])

Everything that is wrong is reported at once as `BadInput`, each with file and line, dotted path, value and rule.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pipelines import pods
from pipelines.operation import KubeflowConfig, ScheduleConfig, ScheduleName
from pipelines.pods import ImageName, LabelKey, LabelValue, Name, Quantity, amount
from trainer.config import (
    DataConfig,
    EvaluateConfig,
    GroupConfig,
    JobConfig,
    NotifyConfig,
    Place,
    PositiveInt,
    Problem,
    PushConfig,
    RetrainConfig,
    Section,
    ServingConfig,
    TrainConfig,
    ValidateConfig,
    parse,
    text,
)
from trainer.config_file import override, read_config_file
from trainer.errors import BadInput
from trainer.metric_names import ALL, names_of

_Name = text(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "lower-case letters, digits and hyphens, at most 63, a letter first")

_MOST_SECS = 2**31 - 1  # of Kubernetes's activeDeadlineSeconds
_MOST_PODS = 1000  # three digits, with which the longest name of a host has 63 characters


class Accelerator(Section):
    """Accelerators of the training."""

    type: Annotated[str, Field(min_length=1)] = "nvidia.com/gpu"
    """Resource name that the cluster's nodes offer."""
    count: PositiveInt = 1
    """How many."""


class ClusterConfig(GroupConfig):
    """Where and with what the tasks run; used when the pipeline is compiled, never inside a task."""

    launcher: Literal["local", "trainjob", "tfjob"] = "local"
    """What starts the training's processes. `local`: all in the one pod of the training task. `trainjob`: a pod each, by
    Kubeflow Trainer v2. `tfjob`: a pod each, by the training operator v1. On a person's own machine all are `local`."""
    runtime: Name | None = None
    """ClusterTrainingRuntime of a TrainJob. None: `tensorflow-distributed`, or `tensorflow-parameter-server` where there
    are parameter servers, as in manifests/."""
    gang: Literal["kueue", "volcano"] | None = None
    """Who starts all pods of a training or none. None: each starts as there is room for it."""
    queue: Name | None = None
    """Queue of Kueue or Volcano that a training waits in."""
    topology: LabelKey | None = None
    """Label of nodes whose value is the same for all pods of a training, such as `topology.kubernetes.io/zone`. None: they
    may be anywhere."""
    image: ImageName = "trireme:0.1.0"
    """Container image of every task."""
    pipeline_root: Place | None = None
    """Folder or `gs://` prefix for prepared data, checkpoints and the registry. None: given when a run is submitted;
    `trireme run` uses `--root`."""
    cpu: Quantity | None = None
    """CPU that the training asks for, each of its pods, such as `4` or `500m`. None: no request."""
    memory: Quantity | None = None
    """Memory that the training asks for and may use, each of its pods, such as `16Gi`. None: no request."""
    accelerator: Accelerator | None = None
    """Accelerators of the training, of each of its pods. None: it trains on the CPU."""
    gpu: pods.Gpu | None = None
    """GPUs of the training, of each of its pods, with the nodes that have them; in place of `accelerator`."""
    node_selector: dict[LabelKey, LabelValue] = {}
    """Labels of the nodes that the training may run on."""
    node_affinity: list[pods.NodeAffinity] = []
    """Nodes that the training must, or would rather, run on."""
    tolerations: list[pods.Toleration] = []
    """Taints of nodes that the training may run on all the same."""
    shared_memory: Quantity | None = None
    """Size of the training's `/dev/shm`, such as `8Gi`, which NCCL needs for several GPUs; it counts as memory. None: 64Mi,
    and 1Gi in each pod of a job of many pods."""
    timeout_secs: Annotated[int, Field(ge=1, le=_MOST_SECS)] | None = None
    """Longest time of the training's pod, after which it is killed and counts as failed; of the whole job with a launcher of
    many pods. Longer than `start_timeout_secs` where processes wait for one another. None: no limit; for a job of many pods
    seven days, lest it outlive its launcher."""
    service_account: Name | None = None
    """Kubernetes service account of the runs' pods. None: the server's own, `pipeline-runner`."""
    secrets: list[pods.Secret] = []
    """Kubernetes secrets that every task gets."""
    volumes: list[pods.Claim] = []
    """Persistent volume claims that every task mounts."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled. None: Kubernetes's own rule."""
    pull_secrets: list[Name] = []
    """Secrets for the image's registry."""
    labels: dict[LabelKey, LabelValue] = {}
    """Labels of every task's pod."""
    annotations: dict[LabelKey, str] = {}
    """Annotations of every task's pod."""
    security: pods.Security | None = None
    """As whom the tasks run. None: as the image says."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """How often the cluster starts a failed task again. A local run never does: there a person is looking."""
    cache: bool = True
    """Whether the cluster may reuse the outputs of preparation and training when their inputs are the same."""

    refused: ClassVar[dict[str, str]] = {
        "priority_class": "cannot be said in a compiled pipeline; make the class the cluster's default, or set it by a"
        " policy on a label of cluster.labels (docs/operations.md)",
        "resources": "give cluster.cpu, cluster.memory and cluster.gpu, such as gpu: {type: nvidia-l4, count: 4}",
        "affinity": "give node_affinity; the affinity of pods is ignored by Kubeflow's server (docs/operations.md)",
        "pod_affinity": "is ignored by Kubeflow's server; set it by a policy on a label of cluster.labels"
        " (docs/operations.md)",
        "pod_anti_affinity": "is ignored by Kubeflow's server; set it by a policy on a label of cluster.labels"
        " (docs/operations.md)",
        "runtime_class": "cannot be said in a compiled pipeline; set it by a policy on a label of cluster.labels"
        " (docs/operations.md)",
        "env": "put what is not secret into the image, and what is into cluster.secrets",
    }

    @property
    def num_gpus(self) -> int:
        """Accelerators of each pod of the training, however they were asked for."""
        return self.gpu.count if self.gpu else self.accelerator.count if self.accelerator else 0

    def problems(self) -> Iterator[Problem]:
        """Settings that exclude one another, and names that are taken."""
        yield from super().problems()
        for field in ("gpu", "security", "node_affinity", "tolerations", "secrets", "volumes"):
            value = getattr(self, field)
            for index, section in enumerate(value) if isinstance(value, list) else [(None, value)]:
                for problem in section.problems() if section else ():
                    place = field if index is None else f"{field}.{index}"
                    yield problem._replace(path=f"{place}.{problem.path}")
        if self.gpu is not None and self.accelerator is not None:
            yield Problem("accelerator", self.accelerator.model_dump(), "stands beside cluster.gpu; give one of them")
        if self.gpu is not None and self.node_selector.get(self.gpu.label, self.gpu.type) != self.gpu.type:
            yield Problem(
                f"node_selector.{self.gpu.label}",
                self.node_selector[self.gpu.label],
                f"cluster.gpu.type is {self.gpu.type}",
            )
        if self.shared_memory is not None and self.memory is None:
            yield Problem(
                "shared_memory", self.shared_memory, "counts as memory, and cluster.memory is null; give that too"
            )
        elif self.shared_memory is not None and amount(self.shared_memory) >= amount(self.memory):
            yield Problem(
                "shared_memory", self.shared_memory, f"counts as memory, of which cluster.memory allows {self.memory}"
            )
        waits = self.is_several or self.launcher != "local"
        if waits and self.timeout_secs is not None and self.timeout_secs <= self.start_timeout_secs:
            yield Problem(
                "timeout_secs", self.timeout_secs, "ends the training before its processes have waited for one another"
                f" (cluster.start_timeout_secs is {self.start_timeout_secs:g}), and nobody learns which is missing; give more"
                " than that, or wait less",
            )  # fmt: skip
        yield from self._launcher_problems()
        taken = {"/dev/shm": "cluster.shared_memory"} if self.shared_memory else {}  # noqa: S108
        if self.launcher != "local":  # what manifests/ and the TFJob mount themselves
            taken |= {"/tmp": "the pods' scratch folder", "/dev/shm": "the pods' shared memory"}  # noqa: S108
        for place, path in [
            *((f"secrets.{index}.path", one.path) for index, one in enumerate(self.secrets)),
            *((f"volumes.{index}.path", one.path) for index, one in enumerate(self.volumes)),
        ]:
            if path in taken:
                yield Problem(place, path, f"is taken by {taken[path]}")
            elif path is not None:
                taken[path] = place

    def _launcher_problems(self) -> Iterator[Problem]:
        """What only a job of many pods can do, and what it cannot."""
        many = self.launcher != "local"
        for field in ("gang", "queue", "topology", "runtime"):
            if getattr(self, field) is not None and not many:
                rule = "is for a job of many pods, and cluster.launcher is local"
                yield Problem(field, getattr(self, field), rule)
        if self.runtime is not None and self.launcher == "tfjob":
            yield Problem("runtime", self.runtime, "is a TrainJob's; a TFJob has none")
        if self.queue is not None and self.gang is None:
            yield Problem("queue", self.queue, "is of Kueue or Volcano: say which (cluster.gang)")
        if self.gang == "kueue" and self.queue is None:
            yield Problem("gang", self.gang, "admits what waits in one of its queues: name it (cluster.queue)")
        if not many:
            return
        if self.gang == "volcano" and self.launcher == "trainjob" and self.runtime is None:
            yield Problem(
                "gang", self.gang, "a TrainJob's scheduler stands in its runtime: name one that has schedulerName volcano"
                " and a podGroupPolicy (cluster.runtime; docs/kubernetes.md)",
            )  # fmt: skip
        root = self.pipeline_root
        if root is not None and not root.startswith("gs://"):
            yield Problem(
                "pipeline_root", root, f"the pods of a {self.launcher} fetch the data and leave the model by themselves,"
                " and gs:// is where they can",
            )  # fmt: skip
        if self.launcher == "trainjob" and self.pull_policy in ("Always", "Never"):
            yield Problem(
                "pull_policy", self.pull_policy, "cannot be said of a TrainJob's pods; leave it out, or use an image with a"
                " digest",
            )  # fmt: skip
        if (pods_in_all := self.num_pods) > _MOST_PODS:
            yield Problem(
                "num_workers", self.num_workers, f"makes {pods_in_all} pods with {self.num_parameter_servers} parameter"
                f" servers, and at most {_MOST_PODS} fit into the names of their hosts",
            )  # fmt: skip

    @property
    def num_pods(self) -> int:
        """Pods of the training with a launcher of many pods."""
        return self.num_workers + self.num_parameter_servers + (1 if self.num_parameter_servers else 0)

    def job(self) -> JobConfig | None:
        """What the launching task must know; None where the training is one pod."""
        if self.launcher == "local":
            return None
        ours = "tensorflow-parameter-server" if self.num_parameter_servers else "tensorflow-distributed"
        limit = {"deadline_secs": self.timeout_secs} if self.timeout_secs else {}
        return JobConfig(
            launcher=self.launcher,
            runtime=self.runtime or ours,
            gang=self.gang,
            queue=self.queue,
            topology=self.topology,
            pod=pods.template(self),
            **limit,
        )

    def group(self) -> GroupConfig:
        """The part that the training itself must know."""
        return GroupConfig(**{key: getattr(self, key) for key in GroupConfig.model_fields})


class Config(Section):
    """A run: one section per step, and the cluster."""

    name: Annotated[_Name, Field(examples=["digits"])]
    """Name of the pipeline and of the model in the registry: lower-case letters, digits and hyphens."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Decides the order of the records, the first weights and every epoch's order."""
    data: DataConfig = DataConfig()
    """Where the examples come from and how they are prepared."""
    validate_data: ValidateConfig | None = None
    """How the prepared data is looked at before anything is trained on it. None: it is not, and the pipeline has no such
    step."""
    train: TrainConfig = TrainConfig()
    """The model, its optimizer, and how the training goes."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """How the model is measured and what it has to reach."""
    serving: ServingConfig = ServingConfig()
    """What the exported model must do where it will serve."""
    push: PushConfig = PushConfig()
    """Where a blessed model goes."""
    retrain: RetrainConfig = RetrainConfig()
    """Whether there is anything to train for."""
    cluster: ClusterConfig = ClusterConfig()
    """Where and with what the tasks run."""
    kubeflow: KubeflowConfig = KubeflowConfig()
    """The server that runs the pipeline, and how to get in."""
    schedules: dict[ScheduleName, ScheduleConfig] = {}
    """When the pipeline runs by itself, by name."""
    notify: NotifyConfig | None = None
    """Who hears how a run ended. None: nobody."""

    def problems(self) -> Iterator[Problem]:
        """Those of every section, and combinations across sections that cannot work."""
        for name in type(self).model_fields:
            section = getattr(self, name)
            if isinstance(section, Section):
                for problem in section.problems():
                    yield problem._replace(path=f"{name}.{problem.path}")
        for name, schedule in self.schedules.items():
            for problem in schedule.problems():
                yield problem._replace(path=f"schedules.{name}.{problem.path}")
            yield from self._schedule_problems(name, schedule)
        train, cluster = self.train, self.cluster
        yield from self._task_problems()
        gpus = cluster.num_gpus
        if gpus > 1 and train.strategy in ("default", "one_device"):
            yield Problem(
                "train.strategy", train.strategy, f"would leave {gpus - 1} of {gpus} accelerators idle; use mirrored"
            )
        yield from self._group_problems()
        if gpus and train.num_virtual_devices is not None:
            yield Problem(
                "train.num_virtual_devices",
                train.num_virtual_devices,
                "is for rehearsing without accelerators, and cluster.accelerator asks for some",
            )
        if train.early_stopping is not None and self.data.splits.validation is None:
            yield Problem(
                "train.early_stopping",
                train.early_stopping.model_dump(),
                "needs a validation split, and data.splits.validation is null",
            )

    def scheduled(self, name: str) -> "Config":
        """The configuration of one schedule's runs: this one with the schedule's overrides put in.

        Raises:
            BadInput: The overrides make it invalid.
        """
        settings = [f"{path}={json.dumps(value)}" for path, value in self.schedules[name].overrides.items()]
        data = override(self.model_dump(mode="json", exclude={"schedules"}), settings, {})
        return parse(type(self), data).model_copy(update={"schedules": self.schedules})

    def _schedule_problems(self, name: str, schedule: ScheduleConfig) -> Iterator[Problem]:
        path = f"schedules.{name}.overrides"
        for setting in schedule.overrides:
            if setting.partition(".")[0] not in ("data", "train", "evaluate", "serving", "push", "retrain", "seed"):
                yield Problem(f"{path}.{setting}", schedule.overrides[setting],
                              "can override data, train, evaluate, serving, push, retrain and seed only")  # fmt: skip
                return
        if schedule.overrides:
            try:
                self.scheduled(name)
            except BadInput as error:
                yield Problem(path, schedule.overrides, f"cannot work: {'; '.join(str(error).splitlines())}")

    def _group_problems(self) -> Iterator[Problem]:
        """A strategy that does not fit the number of processes."""
        train, workers, servers = self.train, self.cluster.num_workers, self.cluster.num_parameter_servers
        strategy = train.strategy
        if servers and strategy not in ("parameter_server", "auto"):
            yield Problem("train.strategy", strategy, f"would not use {servers} parameter server(s)")
        elif strategy == "parameter_server" and not servers:
            yield Problem("cluster.num_parameter_servers", 0, "train.strategy parameter_server needs at least 1")
        elif strategy == "multi_worker_mirrored" and workers < 2:
            yield Problem("cluster.num_workers", workers, "train.strategy multi_worker_mirrored needs at least 2")
        elif workers > 1 and strategy not in ("multi_worker_mirrored", "parameter_server", "auto"):
            yield Problem(
                "train.strategy", strategy, f"trains in one process, and cluster.num_workers is {workers};"
                " use multi_worker_mirrored"
            )  # fmt: skip
        if workers > 1 and not servers and train.global_batch_size < workers:
            yield Problem(
                "train.global_batch_size", train.global_batch_size, f"must give each of {workers} workers an example"
            )
        if workers > 1 and train.loop == "keras_fit":
            yield Problem("train.loop", train.loop, "Keras cannot read its metrics on several workers; use own")

    def _task_problems(self) -> Iterator[Problem]:
        """Settings of classes where the label is a number, and the other way round, as far as `data.task` says it."""
        if self.data.task is None:
            return
        train, task = self.train, self.data.task
        other = "accuracy" if task == "regression" else "mean_absolute_error"
        watched = [("keep_best", train.keep_best)]
        if train.early_stopping is not None:
            watched.append(("early_stopping.metric", train.early_stopping.metric))
        for key, metric in watched:
            if metric == other:
                yield Problem(f"train.{key}", metric, f"is no metric of {task} (data.task)")
        of_this_task = (*names_of(task, self.evaluate.quantiles), *self.evaluate.own_metrics)
        for path, thresholds in self.evaluate.thresholds_by_path():
            for metric in thresholds:
                if metric in ALL and metric not in of_this_task:
                    yield Problem(f"evaluate.{path}", metric, f"is no metric of {task} (data.task)")
        if task == "regression":
            for key in ("class_weights", "label_smoothing"):
                if getattr(train, key):
                    yield Problem(
                        f"train.{key}", getattr(train, key), "belongs to classes, and data.task is regression"
                    )


def load_config(file: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads, overrides and validates a configuration file.

    Args:
        file: The YAML file.
        overrides: `path=value` settings that take the place of the file's.

    Raises:
        BadInput: Everything that is wrong, one line each.
    """
    data, lines = read_config_file(file)
    data = _strategy_of_several(override(data, overrides, lines))
    return parse(Config, data, lines=lines, source=str(file))


def _strategy_of_several(data: Any) -> Any:
    """`train.strategy: auto` where several processes or accelerators are asked for and no strategy is given.

    The default is for one device; who asks for two has said enough.
    """
    if not isinstance(data, dict):
        return data
    cluster, train = data.get("cluster"), data.get("train", {})
    if not isinstance(cluster, dict) or not isinstance(train, dict) or "strategy" in train:
        return data
    if not any(
        isinstance(number, int) and number > least
        for number, least in (
            (cluster.get("num_workers"), 1),
            (cluster.get("num_parameter_servers"), 0),
            (_count_of(cluster.get("gpu")), 1),
            (_count_of(cluster.get("accelerator")), 1),
        )
    ):
        return data
    return {**data, "train": {**train, "strategy": "auto"}}


def _count_of(accelerators: Any) -> Any:
    return accelerators.get("count") if isinstance(accelerators, dict) else None


def load_config_as_of(file: Path, overrides: Sequence[str], as_of: str | None) -> Config:
    """Reads a configuration for a run as it would have been at another moment, by the last day of its data window.

    Raises:
        BadInput: The moment cannot be read, or there is no window that it could move.
    """
    config = load_config(file, overrides)
    if as_of is None:
        return config
    from pipelines.operation import moment
    from trainer.data.window import last_day

    if config.data.window is None:
        raise BadInput(f"--as-of = {as_of}: needs a data.window")
    try:
        day = last_day(config.data.window, moment(as_of))
    except BadInput as error:
        raise BadInput(f"--as-of = {as_of}: {error}") from None
    return load_config(file, [*overrides, f"data.window.until={day}"])


def json_schema() -> str:
    """The JSON Schema of a configuration file, for editors, with every field's description."""
    schema: dict[str, Any] = Config.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
