"""What the pods of a run look like on Kubernetes, as far as Kubeflow's compiled pipeline can say it.

    dress(task, cluster)             # what every task gets: secrets, volumes, labels, pull policy, security
    dress_training(task, cluster)    # what the training gets besides: GPUs, nodes, shared memory, time limit
    template(cluster)                # both, as Kubernetes's own pod template, for a training of many pods

The compiled YAML cannot say a priority class or a read-only root file system, and its field for the affinity of pods is read by
no server: such a setting is refused, with what to do in its place, rather than ignored.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from trainer.config import PositiveInt, Problem, Section, text
from trainer.devices import REQUEST_VARIABLE

if TYPE_CHECKING:
    from pipelines.config import ClusterConfig
    from trainer.config import NotifyConfig

_LABEL = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
Name = text(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", "a Kubernetes name: lower-case letters, digits, hyphens and dots")
LabelKey = text(rf"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?{_LABEL}", "a Kubernetes label's key, such as example.org/team")
LabelValue = text(
    rf"({_LABEL})?", "a Kubernetes label's value: at most 63 letters, digits, hyphens, dots and underscores"
)
ImageName = text(
    r"([A-Za-z0-9][A-Za-z0-9.-]*(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?",
    "the name of an image: lower-case words with slashes between, then :TAG or @sha256:DIGEST",
)
Quantity = text(r"\d+(\.\d+)?(m|k|Ki|[MGTPE]i?)?", "a Kubernetes quantity such as 4, 500m or 16Gi")
_SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "Ki": 1024.0} | {
    letter + i: float(base**power)
    for power, letter in enumerate("MGTPE", start=2)
    for i, base in (("", 1000), ("i", 1024))
}
_Path = text(r"/[^:]*", "an absolute path without a colon")
_Variable = text(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")


def amount(quantity: str) -> float:
    """A Kubernetes quantity as a number: `500m` is 0.5, `1Ki` is 1024."""
    number = quantity.rstrip("mkKMGTPEi")
    return float(number) * _SUFFIXES[quantity.removeprefix(number)]


class Gpu(Section):
    """GPUs of the training task, with the nodes that have them: one block in place of accelerator, selector and toleration."""

    type: LabelValue
    """What the nodes' label says, such as `nvidia-l4`."""
    count: PositiveInt = 1
    """How many."""
    label: LabelKey = "cloud.google.com/gke-accelerator"
    """The label that says it; `nvidia.com/gpu.product` where NVIDIA's feature discovery labels the nodes."""
    resource: LabelKey = "nvidia.com/gpu"
    """Resource that the nodes offer. A taint of the same key is tolerated."""


class Toleration(Section):
    """A taint of nodes that the training may run on all the same."""

    key: LabelKey | None = None
    """Of the taint. None: every one."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Whether the value has to be the same, or any will do."""
    value: LabelValue | None = None
    """Of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Of the taint. None: every one."""
    seconds: Annotated[int, Field(ge=0)] | None = None
    """How long `NoExecute` is tolerated. None: for ever."""

    def problems(self) -> Iterator[Problem]:
        """Combinations that Kubernetes refuses when the pod is made, which is too late."""
        if self.operator == "Exists" and self.value is not None:
            yield Problem("value", self.value, "goes with operator Equal; Exists takes any value")
        if self.key is None and self.operator != "Exists":
            yield Problem("key", None, "can be left out with operator Exists only")
        if self.seconds is not None and self.effect != "NoExecute":
            yield Problem("seconds", self.seconds, "goes with effect NoExecute only")


class NodeTerm(Section):
    """One condition on a node's labels."""

    key: LabelKey
    """Of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = "In"
    """How the values are compared."""
    values: list[str] = []
    """What it is compared with."""

    def problems(self) -> Iterator[Problem]:
        """Values where there must be none, and none where there must be some."""
        if self.operator in ("Exists", "DoesNotExist") and self.values:
            yield Problem("values", self.values, f"must be empty with operator {self.operator}")
        if self.operator in ("In", "NotIn") and not self.values:
            yield Problem("values", self.values, f"must not be empty with operator {self.operator}")
        if self.operator in ("Gt", "Lt") and not (len(self.values) == 1 and self.values[0].isdecimal()):
            yield Problem("values", self.values, f"must be one whole number with operator {self.operator}")


class NodeAffinity(Section):
    """Nodes that the training must, or would rather, run on."""

    require: list[NodeTerm] = Field(min_length=1)
    """Conditions that must all hold. Of several affinities without a weight, one suffices."""
    weight: Annotated[int, Field(ge=1, le=100)] | None = None
    """How much such a node is preferred. None: no other node will do."""

    def problems(self) -> Iterator[Problem]:
        """Those of the conditions."""
        for index, term in enumerate(self.require):
            for problem in term.problems():
                yield problem._replace(path=f"require.{index}.{problem.path}")


class Secret(Section):
    """A Kubernetes secret that every task gets. The configuration names it and never holds it."""

    name: Name
    """Of the secret."""
    variables: dict[str, _Variable] = {}
    """Key of the secret → environment variable."""
    path: _Path | None = None
    """Folder where each key of the secret is a file."""
    optional: bool = False
    """Whether the tasks may run without it."""

    def problems(self) -> Iterator[Problem]:
        """A secret that nobody could read."""
        if not self.variables and self.path is None:
            yield Problem("variables", {}, "a secret needs variables, path or both")


class Claim(Section):
    """A persistent volume claim that every task mounts."""

    name: Name
    """Of the claim."""
    path: _Path
    """Where it is mounted."""
    sub_path: str = ""
    """Folder of the volume. Empty: the whole volume."""


class Security(Section):
    """As whom the tasks run. The server drops all capabilities and forbids privilege escalation by itself."""

    run_as_user: Annotated[int, Field(ge=0)] | None = None
    """User identifier. None: that of the image."""
    run_as_group: Annotated[int, Field(ge=0)] | None = None
    """Group identifier. None: that of the image."""
    run_as_non_root: bool = True
    """Refuse to start as root."""

    refused: ClassVar[dict[str, str]] = {
        "read_only_root_filesystem": "cannot be said in a compiled pipeline; the image needs none but /tmp, so set it by a"
        " policy of the cluster (docs/operations.md)",
        "allow_privilege_escalation": "is forbidden by the server for every task already; leave it out",
        "capabilities": "are all dropped by the server for every task already; leave it out",
    }

    def problems(self) -> Iterator[Problem]:
        """Root that may not be root."""
        if self.run_as_non_root and self.run_as_user == 0:
            yield Problem("run_as_user", 0, "is root, and run_as_non_root is true")


def dress(task: Any, cluster: "ClusterConfig") -> None:
    """Gives a task of kfp what every task gets."""
    from kfp import kubernetes

    for secret in cluster.secrets:
        if secret.variables:
            kubernetes.use_secret_as_env(task, secret.name, secret.variables, optional=secret.optional)
        if secret.path:
            kubernetes.use_secret_as_volume(task, secret.name, secret.path, optional=secret.optional)
    for claim in cluster.volumes:
        kubernetes.mount_pvc(task, claim.name, claim.path, claim.sub_path)
    if cluster.pull_policy:
        kubernetes.set_image_pull_policy(task, cluster.pull_policy)
    if cluster.pull_secrets:
        kubernetes.set_image_pull_secrets(task, cluster.pull_secrets)
    for key, value in sorted(cluster.labels.items()):
        kubernetes.add_pod_label(task, key, value)
    for key, value in sorted(cluster.annotations.items()):
        kubernetes.add_pod_annotation(task, key, value)
    if cluster.security is not None:
        kubernetes.set_security_context(
            task, cluster.security.run_as_user, cluster.security.run_as_group, cluster.security.run_as_non_root
        )


def give_addresses(task: Any, config: "NotifyConfig") -> None:
    """Gives the exit task the addresses of those it tells, from Kubernetes secrets; without them it still runs."""
    from kfp import kubernetes

    from trainer.notify import variable

    for index, channel in enumerate(config.channels):
        keys = ("url", "to", "from") if channel.kind == "email" else ("url",)
        kubernetes.use_secret_as_env(task, channel.secret, {key: variable(index, key) for key in keys}, optional=True)


def give_run(task: Any) -> None:
    """Tells a task its run by a variable, which is no part of the cache's key."""
    from kfp import kubernetes

    kubernetes.use_field_path_as_env(task, "TRIREME_RUN", "metadata.labels['pipeline/runid']")


def dress_training(task: Any, cluster: "ClusterConfig") -> None:
    """Gives the training task what it gets besides: resources, its nodes, shared memory and its time limit."""
    if cluster.cpu:
        task.set_cpu_request(cluster.cpu)
    if cluster.memory:
        task.set_memory_request(cluster.memory)
        task.set_memory_limit(cluster.memory)
    if cluster.accelerator:
        task.set_accelerator_type(cluster.accelerator.type)
        task.set_accelerator_limit(cluster.accelerator.count)
    if cluster.num_gpus:
        # A GPU image that trains on the CPU all the same is the classic fault: the trainer counts what it sees.
        task.set_env_variable(REQUEST_VARIABLE, str(cluster.num_gpus))
    from kfp import kubernetes

    if cluster.gpu:
        task.set_accelerator_type(cluster.gpu.resource)
        task.set_accelerator_limit(cluster.gpu.count)
        kubernetes.add_node_selector(task, cluster.gpu.label, cluster.gpu.type)
        kubernetes.add_toleration(task, key=cluster.gpu.resource, operator="Exists", effect="NoSchedule")
    for key, value in sorted(cluster.node_selector.items()):
        kubernetes.add_node_selector(task, key, value)
    for one in cluster.tolerations:
        kubernetes.add_toleration(task, one.key, one.operator, one.value, one.effect, one.seconds)
    for affinity in cluster.node_affinity:
        kubernetes.add_node_affinity(task, [term.model_dump() for term in affinity.require], weight=affinity.weight)
    if cluster.shared_memory:
        # Kubernetes gives a container 64 MiB of it, in which NCCL's buffers for several GPUs do not fit.
        kubernetes.empty_dir_mount(task, "shared-memory", "/dev/shm", "Memory", cluster.shared_memory)  # noqa: S108
    if cluster.timeout_secs:
        kubernetes.set_timeout(task, cluster.timeout_secs)


def template(cluster: "ClusterConfig") -> dict[str, Any]:
    """The pod template of a training of many pods, with one container `node`: what `dress` and `dress_training` give."""
    variables, volumes, mounts = [], [], []
    for index, secret in enumerate(cluster.secrets):
        for key, variable in sorted(secret.variables.items()):
            reference = {"name": secret.name, "key": key, "optional": secret.optional}
            variables.append({"name": variable, "valueFrom": {"secretKeyRef": reference}})
        if secret.path:
            source = {"secretName": secret.name, "optional": secret.optional}
            volumes.append({"name": f"secret-{index}", "secret": source})
            mounts.append({"name": f"secret-{index}", "mountPath": secret.path, "readOnly": True})
    for index, claim in enumerate(cluster.volumes):
        volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim.name}})
        sub_path = {"subPath": claim.sub_path} if claim.sub_path else {}
        mounts.append({"name": f"claim-{index}", "mountPath": claim.path, **sub_path})
    if cluster.shared_memory:
        memory = {"medium": "Memory", "sizeLimit": cluster.shared_memory}
        volumes.append({"name": "shared-memory", "emptyDir": memory})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})  # noqa: S108
    if cluster.num_gpus:
        variables.append({"name": REQUEST_VARIABLE, "value": str(cluster.num_gpus)})
    container = {
        "name": "node",
        "image": cluster.image,
        "imagePullPolicy": cluster.pull_policy,
        "env": variables,
        "resources": _resources(cluster),
        "volumeMounts": mounts,
        "securityContext": _security(cluster.security),
    }
    selector = {cluster.gpu.label: cluster.gpu.type} if cluster.gpu else {}
    spec = {
        "serviceAccountName": cluster.service_account,
        "nodeSelector": selector | cluster.node_selector,
        "affinity": _affinity(cluster.node_affinity),
        "tolerations": _tolerations(cluster),
        "imagePullSecrets": [{"name": name} for name in cluster.pull_secrets],
        "volumes": volumes,
    }
    metadata = {"labels": dict(cluster.labels), "annotations": dict(cluster.annotations)}
    given = {key: value for key, value in metadata.items() if value}
    return {
        **({"metadata": given} if given else {}),
        "spec": {
            **{key: value for key, value in spec.items() if value},
            "containers": [{key: value for key, value in container.items() if value}],
        },
    }


def _resources(cluster: "ClusterConfig") -> dict[str, dict[str, str]]:
    requests, limits = {}, {}
    if cluster.cpu:
        requests["cpu"] = cluster.cpu
    if cluster.memory:
        requests["memory"] = limits["memory"] = cluster.memory
    if cluster.gpu:
        limits[cluster.gpu.resource] = str(cluster.gpu.count)
    if cluster.accelerator:
        limits[cluster.accelerator.type] = str(cluster.accelerator.count)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _security(security: Security | None) -> dict[str, Any]:
    if security is None:
        return {}
    given = {
        "runAsUser": security.run_as_user,
        "runAsGroup": security.run_as_group,
        "runAsNonRoot": security.run_as_non_root,
        "allowPrivilegeEscalation": False,  # as Kubeflow's server says for every task
        "capabilities": {"drop": ["ALL"]},
    }
    return {key: value for key, value in given.items() if value is not None}


def _tolerations(cluster: "ClusterConfig") -> list[dict[str, Any]]:
    found = []
    if cluster.gpu:
        found.append({"key": cluster.gpu.resource, "operator": "Exists", "effect": "NoSchedule"})
    for one in cluster.tolerations:
        given = {
            "key": one.key,
            "operator": one.operator,
            "value": one.value,
            "effect": one.effect,
            "tolerationSeconds": one.seconds,
        }
        found.append({key: value for key, value in given.items() if value is not None})
    return found


def _affinity(affinities: list[NodeAffinity]) -> dict[str, Any]:
    required, preferred = [], []
    for one in affinities:
        term = {"matchExpressions": [_expression(condition) for condition in one.require]}
        if one.weight is None:
            required.append(term)
        else:
            preferred.append({"weight": one.weight, "preference": term})
    rules: dict[str, Any] = {}
    if required:
        rules["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": required}
    if preferred:
        rules["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    return {"nodeAffinity": rules} if rules else {}


def _expression(term: NodeTerm) -> dict[str, Any]:
    values = {"values": list(term.values)} if term.values else {}
    return {"key": term.key, "operator": term.operator, **values}
