"""The job that a group of processes becomes on Kubernetes, as the launching task is told of it."""

from typing import Any, Literal

from trainer.config.section import PositiveInt, Section

JOB_VARIABLE = "TRIREME_JOB"
"""Environment variable of the launching task with a `JobConfig` as JSON. It is no parameter, which Kubeflow's cache would
compare: what the pods are given does not decide what is trained."""

DEFAULT_DEADLINE_SECS = 7 * 24 * 3600
"""After so long a job ends by itself where nobody gave a limit, for its launcher may be gone by then."""


class JobConfig(Section):
    """One job of several pods: which engine runs it, and what its pods are like."""

    launcher: Literal["trainjob", "tfjob"]
    """`trainjob`: Kubeflow Trainer v2. `tfjob`: the training operator v1."""
    runtime: str
    """ClusterTrainingRuntime that a TrainJob refers to; not looked at for a TFJob."""
    gang: Literal["kueue", "volcano"] | None = None
    """Who starts all pods or none. None: each is started as there is room."""
    queue: str | None = None
    """Queue of Kueue or Volcano."""
    topology: str | None = None
    """Label of nodes, such as `topology.kubernetes.io/zone`, whose value must be the same for all pods."""
    deadline_secs: PositiveInt = DEFAULT_DEADLINE_SECS
    """Longest time of the job, after which the cluster ends it."""
    pod: dict[str, Any]
    """Kubernetes's own pod template, with the one container `node`."""
