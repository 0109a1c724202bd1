"""What the pods of a job say of themselves, from the dictionaries that the API server writes."""

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.cluster import member_name
from trainer.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED
from trainer.launch import MemberFailure

RESTARTABLE_EXIT_CODE = 138
"""What 1 becomes under an operator that starts a pod again from 128 up only."""

NEVER_STARTS = ("InvalidImageName", "ErrImageNeverPull")
"""Reasons that no waiting mends."""

_STARTING = ("ContainerCreating", "PodInitializing")
_PULLING = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", *NEVER_STARTS)


@dataclass(frozen=True)
class Waiting:
    """Why a pod does not run yet."""

    text: str
    """For people, with the cluster's own reason."""
    is_hopeless: bool = False
    """Whether no waiting mends it."""


def uid_of(found: Mapping[str, Any]) -> str:
    """Identity of an object."""
    return found["metadata"]["uid"]


def name_of(found: Mapping[str, Any]) -> str:
    """Name of an object."""
    return found["metadata"]["name"]


def labels_of(found: Mapping[str, Any]) -> dict[str, str]:
    """Labels of an object."""
    return found["metadata"].get("labels") or {}


def is_leaving(found: Mapping[str, Any]) -> bool:
    """Whether somebody has asked for its deletion."""
    return bool(found["metadata"].get("deletionTimestamp"))


def condition_of(found: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """The condition of one kind, if it holds."""
    for condition in found.get("status", {}).get("conditions") or ():
        if condition["type"] == kind and condition["status"] == "True":
            return condition
    return None


def phase_of(pod: Mapping[str, Any]) -> str:
    """Pending, Running, Succeeded, Failed or Unknown."""
    return pod.get("status", {}).get("phase", "Pending")


def has_started(pod: Mapping[str, Any], container: str) -> bool:
    """Whether the program has begun, however it went on."""
    state = _state(pod, container)
    return "running" in state or "terminated" in state or phase_of(pod) in ("Succeeded", "Failed")


def why_waiting(pod: Mapping[str, Any]) -> Waiting | None:
    """Why a pod that has not started waits; None where Kubernetes says no more than that it is at work."""
    status = pod.get("status", {})
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            if condition.get("reason") == "SchedulingGated":
                return Waiting("waits at a scheduling gate, which the queue's admission removes")
            return Waiting(f"cannot be scheduled: {condition.get('message') or condition.get('reason')}")
    for one in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        waiting = one.get("state", {}).get("waiting")
        if not waiting or waiting.get("reason", "") in ("", *_STARTING):
            continue
        reason = waiting["reason"]
        said = f"{reason}: {waiting['message']}" if waiting.get("message") else reason
        if reason in _PULLING:
            return Waiting(f"cannot pull its image {one.get('image', '')}: {said}", reason in NEVER_STARTS)
        return Waiting(f"cannot be started: {said}")
    return None


def failure_of(pod: Mapping[str, Any], container: str, member: str) -> MemberFailure | None:
    """How a pod failed, without its log; None while it has not."""
    status = pod.get("status", {})
    ended = _state(pod, container).get("terminated")
    disrupted = condition_of(pod, "DisruptionTarget")
    if status.get("reason") == "Evicted" or (disrupted and (ended is None or ended.get("exitCode") != 0)):
        why = f"{disrupted['reason']}: {disrupted.get('message', '')}" if disrupted else status.get("message", "")
        if phase_of(pod) == "Failed" or is_leaving(pod):
            return MemberFailure(member=member, reason=f"was removed by the cluster: {why.strip(': ')}")
    if ended is None:
        if phase_of(pod) != "Failed":
            return None
        said = ": ".join(part for part in (status.get("reason"), status.get("message")) if part)
        return MemberFailure(member=member, reason=f"failed: {said or 'the cluster does not say why'}")
    code = ended.get("exitCode", 0)
    if code == 0:
        return None
    if ended.get("reason") == "OOMKilled":
        limit = "it used more memory than cluster.memory allows (OOMKilled)"
        return MemberFailure(member=member, signal=signal.SIGKILL, reason=f"was ended because {limit}")
    if code == RESTARTABLE_EXIT_CODE:
        return MemberFailure(member=member, exit_code=EXIT_FAILED)
    if code > 128 and code not in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
        with contextlib.suppress(ValueError):
            return MemberFailure(member=member, signal=signal.Signals(code - 128))
    return MemberFailure(member=member, exit_code=code)


def ended_at(pod: Mapping[str, Any], container: str) -> str:
    """When the program ended, as text that sorts; empty while it has not."""
    return _state(pod, container).get("terminated", {}).get("finishedAt") or ""


def _state(pod: Mapping[str, Any], container: str) -> dict[str, Any]:
    for one in pod.get("status", {}).get("containerStatuses") or ():
        if one["name"] == container:
            return one.get("state") or {}
    return {}


def node_member(index: int, num_parameter_servers: int, num_workers: int) -> str:
    """Who a pod of a TrainJob is, by its index: equal workers, or chief, workers and parameter servers in this order."""
    if not num_parameter_servers:
        return member_name("worker", index)
    if index == 0:
        return member_name("chief", 0)
    if index <= num_workers:
        return member_name("worker", index - 1)
    return member_name("ps", index - 1 - num_workers)
