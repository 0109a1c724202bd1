"""What the operators make of an object, on virtual hosts: a TrainJob with its runtime, or a TFJob, as real processes.

    group = Group(jobset_pods(expand_trainjob(trainjob, runtime)), …)
    group.wait_for("epoch 2/8")          # a line of the chief's log
    group.pods[1].kill()
    group.wait()                         # "Complete" or "Failed"

`TrainJobRun` does what the Trainer, the JobSet controller, the Job controller and the kubelet do; `TFJobRun` what the
training operator does. What an object asks for beyond that is refused rather than ignored.
"""

import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from conftest import REPOSITORY
from lean_start import lean_path
from virtual_network import first_process

_LOOK_EVERY_SECS = 0.02


@dataclass
class Pod:
    """One pod: what it is called, what it runs, and what became of it."""

    name: str
    index: int
    names: list
    command: list
    env: dict
    labels: dict = field(default_factory=dict)
    grace_secs: float = 30.0
    host: object = None
    process: object = None
    log_path: Path | None = None
    ended_at: float | None = None
    killed: bool = False

    def start(self, network, folder, environ, limit=None):
        self.host = network.host(self.names)
        if limit:
            self.host.limit(limit)
        self.log_path = folder / f"{self.name}.log"
        scratch = folder / "scratch"  # the same path for all, as /tmp is in containers, and a disk of its own for each
        env = {
            "PATH": os.environ["PATH"], "HOME": str(scratch), "HOSTNAME": self.names[0].split(".")[0],
            "PYTHONPATH": os.pathsep.join([lean_path(folder), str(REPOSITORY), str(REPOSITORY / "tests")]),
            "PYTHONUNBUFFERED": "1", **environ, **self.env, "TMPDIR": str(scratch),
        }  # fmt: skip
        command = [sys.executable if word == "python" else _expanded(word, env) for word in self.command]
        self.process = self.host.start(command, env, env["HOSTNAME"], self.log_path, scratch)

    @property
    def exit_code(self):
        """As the kubelet reports it: 137 for SIGKILL. None while it runs."""
        code = self.process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.monotonic()
        if code is not None and self.killed:
            return 137  # some versions of unshare end with 1 when their child is killed
        return code if code is None or code >= 0 else 128 - code

    @property
    def lines(self):
        return self.log_path.read_text(errors="replace").splitlines()

    def signal(self, number):
        if (child := first_process(self.process)) is not None:
            os.kill(child, number)

    def kill(self):
        """The node is lost, or memory ran out."""
        self.killed = self.exit_code is None
        self.signal(signal.SIGKILL)
        self.process.wait()


def _expanded(word, env):
    """`$(NAME)` is replaced as the kubelet does; `$$(` stands for `$(`."""
    return re.sub(
        r"\$(\$|\(([A-Za-z_][\w.-]*)\))",
        lambda match: "$" if match[1] == "$" else env.get(match[2], match[0]),
        word,
    )


def end(pods):
    """SIGTERM, the grace period, SIGKILL; how many had to be killed."""
    left = [pod for pod in pods if pod.exit_code is None]
    for pod in left:
        pod.signal(signal.SIGTERM)
    began, killed = time.monotonic(), 0
    for pod in left:
        while pod.exit_code is None and time.monotonic() - began < pod.grace_secs:
            time.sleep(_LOOK_EVERY_SECS)
        if pod.exit_code is None:
            killed += 1
            pod.kill()
    return killed


class _Run:
    """A group of pods under a controller. `state` is None until it ends as `Complete` or `Failed`."""

    def __init__(self, network, folder, environ, limit=None):
        self.network, self.folder, self.environ, self.limit = network, folder, environ, limit
        self.pods, self.past = [], []
        self.state, self.reason, self.restarts, self.num_killed = None, None, 0, 0
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        self._start_all()
        return self

    def __exit__(self, *_):
        for pod in self.pods:
            if pod.exit_code is None:
                pod.kill()

    def start_pod(self, pod):
        pod.start(self.network, self.folder, self.environ, self.limit)
        return pod

    def replace(self, old, new):
        self.past.append(old)
        self.pods[self.pods.index(old)] = self.start_pod(new)

    def finish(self, state, reason=None):
        """Ends what still runs, as the controllers do, and notes how the group ended."""
        self.num_killed += end(self.pods)
        self.state, self.reason = state, reason

    def wait_for(self, text, timeout_secs=250.0):
        """The pod that first wrote a line with this text, of those that run now."""
        deadline = time.monotonic() + timeout_secs
        while True:
            self.tick()
            for pod in self.pods:
                if any(text in line for line in pod.lines):
                    return pod
            assert self.state is None, f"{self.state} ({self.reason}) without {text!r}\n{self.report()}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout_secs} s\n{self.report()}"
            time.sleep(_LOOK_EVERY_SECS)

    def wait(self, timeout_secs=450.0):
        """How it ended."""
        deadline = time.monotonic() + timeout_secs
        while self.state is None:
            self.tick()
            assert time.monotonic() < deadline, f"not ended within {timeout_secs} s\n{self.report()}"
            time.sleep(_LOOK_EVERY_SECS)
        return self.state

    def report(self):
        return "\n".join(
            f"--- {pod.name}: {pod.exit_code}\n" + "\n".join(pod.lines[-30:]) for pod in [*self.past, *self.pods]
        )


class TrainJobRun(_Run):
    """A TrainJob on a runtime with one replicated job: JobSet, its Job and their failure policies."""

    def __init__(self, trainjob, runtime, *args, **more):
        super().__init__(*args, **more)
        self.jobset = expand_trainjob(trainjob, runtime)
        spec = self.jobset["spec"]
        self._job_name = spec["replicatedJobs"][0]["name"]
        self._job = spec["replicatedJobs"][0]["template"]["spec"]
        pod = self._job["template"]["spec"]
        known = (len(spec["replicatedJobs"]), self._job["completionMode"], len(pod["containers"]))
        assert known == (1, "Indexed", 1), "the harness knows one Job of one container"
        assert (self._job["backoffLimit"], pod["restartPolicy"]) == (0, "Never"), "the harness restarts whole sets"
        assert spec["network"]["enableDNSHostnames"]

    def _start_all(self):
        self.past += self.pods
        self.pods = []
        for index in range(self._job["completions"]):
            self.pods.append(self.start_pod(self._pod(index)))

    def _pod(self, index):
        name, template = self.jobset["metadata"]["name"], self._job["template"]
        host, container = f"{name}-{self._job_name}-0-{index}", template["spec"]["containers"][0]
        labels = template["metadata"]["labels"] | {
            "jobset.sigs.k8s.io/jobset-name": name,
            "jobset.sigs.k8s.io/replicatedjob-name": self._job_name,
            "jobset.sigs.k8s.io/job-index": "0",
            "jobset.sigs.k8s.io/restart-attempt": str(self.restarts),
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        pod_name = f"{host}-{self.restarts:05d}"
        return Pod(
            name=pod_name, index=index, names=[f"{host}.{name}", host], labels=labels,
            command=[*container["command"], *container.get("args", ())],
            env=environment(container, pod_name, labels) | {"JOB_COMPLETION_INDEX": str(index)},
            grace_secs=template["spec"]["terminationGracePeriodSeconds"],
        )  # fmt: skip

    def tick(self):
        """What the controllers do when they look."""
        if self.state is not None:
            return
        codes = {pod.index: pod.exit_code for pod in self.pods}
        failed = [pod for pod in self.pods if pod.exit_code]
        if failed:
            reason = "PodFailurePolicy" if any(map(self._fails_job, failed)) else "BackoffLimitExceeded"
            policy = self.jobset["spec"].get("failurePolicy")
            rules = policy.get("rules", ()) if policy else ()
            action = next((rule["action"] for rule in rules if reason in rule["onJobFailureReasons"]), "RestartJobSet")
            if policy is None or action == "FailJobSet":
                self.finish("Failed", reason)
            elif self.restarts >= policy["maxRestarts"]:
                self.finish("Failed", "ReachedMaxRestarts")
            else:
                assert action == "RestartJobSet", action
                self.num_killed += end(self.pods)
                self.restarts += 1
                self._start_all()
        elif all(code == 0 for code in codes.values()) or any(codes[index] == 0 for index in self._decisive()):
            self.finish("Complete")

    def _decisive(self):
        rules = self._job.get("successPolicy", {}).get("rules", ())
        return [int(index) for rule in rules for index in rule["succeededIndexes"].split(",")]

    def _fails_job(self, pod):
        for rule in self._job.get("podFailurePolicy", {}).get("rules", ()):
            assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
            if pod.exit_code in rule["onExitCodes"]["values"]:
                return True
        return False


def expand_trainjob(trainjob, runtime):
    """The JobSet that the Trainer makes of a TrainJob and its ClusterTrainingRuntime, as far as processes can tell."""
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": trainjob["metadata"]["name"],
            "namespace": trainjob["metadata"].get("namespace", "default"),
        },
        "spec": json.loads(json.dumps(runtime["spec"]["template"]["spec"])),
    }
    trainer = trainjob["spec"].get("trainer", {})
    for job in jobset["spec"]["replicatedJobs"]:
        if job["template"]["metadata"]["labels"].get("trainer.kubeflow.org/trainjob-ancestor-step") != "trainer":
            continue
        count = trainer.get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
        job["template"]["spec"] |= {"completions": count, "parallelism": count}
        for container in job["template"]["spec"]["template"]["spec"]["containers"]:
            if container["name"] == "node":
                container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
                given = {entry["name"]: entry for entry in container.get("env", ())}
                container["env"] = list((given | {entry["name"]: entry for entry in trainer.get("env", ())}).values())
    jobs = {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}
    for patch in trainjob["spec"].get("runtimePatches", ()):
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            theirs, ours = job["template"]["spec"]["template"], jobs[job["name"]]["template"]["spec"]["template"]
            ours["metadata"]["labels"] |= theirs.get("metadata", {}).get("labels", {})
            ours["spec"] |= {key: value for key, value in theirs["spec"].items() if not isinstance(value, list)}
    return jobset


def environment(container, pod_name, labels):
    """The environment variables of a container, the downward API's with their values."""
    found = {}
    for entry in container.get("env", ()):
        if "valueFrom" not in entry:
            found[entry["name"]] = entry["value"]
        elif path := entry["valueFrom"].get("fieldRef", {}).get("fieldPath"):
            label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
            found[entry["name"]] = pod_name if path == "metadata.name" else labels.get(label[1], "")
        else:
            assert entry["valueFrom"]["secretKeyRef"].get("optional"), f"no such secret here: {entry}"
    return found


class TFJobRun(_Run):
    """A TFJob: TF_CONFIG from the operator, each pod started again alone if its exit code says that it may help."""

    def __init__(self, tfjob, *args, **more):
        super().__init__(*args, **more)
        self.tfjob = tfjob
        self._attempts = {}

    def _start_all(self):
        for kind, replicas in self.tfjob["spec"]["tfReplicaSpecs"].items():
            for index in range(replicas.get("replicas", 1)):
                self.pods.append(self.start_pod(self._pod(kind, index)))

    def _pod(self, kind, index):
        name, namespace = self.tfjob["metadata"]["name"], self.tfjob["metadata"].get("namespace", "default")
        specs = self.tfjob["spec"]["tfReplicaSpecs"]
        container = next(one for one in specs[kind]["template"]["spec"]["containers"] if one["name"] == "tensorflow")
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}

        def service(kind, index):
            return f"{name}-{kind.lower()}-{index}.{namespace}.svc"

        port = ports.get("tfjob-port", 2222)
        cluster = {
            each.lower(): [f"{service(each, i)}:{port}" for i in range(specs[each].get("replicas", 1))]
            for each in specs
        }
        task = {"type": kind.lower(), "index": index}
        config = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})}
        attempt = self._attempts[kind, index] = self._attempts.get((kind, index), -1) + 1
        labels = specs[kind]["template"].get("metadata", {}).get("labels", {})
        pod = Pod(
            name=f"{name}-{kind.lower()}-{index}-{attempt}", index=index, labels=labels,
            names=[service(kind, index), f"{name}-{kind.lower()}-{index}"],
            command=[*container["command"], *container.get("args", ())],
            env=config | environment(container, f"{name}-{kind.lower()}-{index}", labels),
            grace_secs=specs[kind]["template"]["spec"].get("terminationGracePeriodSeconds", 30),
        )  # fmt: skip
        pod.kind = kind
        return pod

    def tick(self):
        """What the operator does when it looks."""
        if self.state is not None:
            return
        specs = self.tfjob["spec"]["tfReplicaSpecs"]
        decisive = next((kind for kind in ("Chief", "Master") if kind in specs), "Worker")
        for pod in list(self.pods):
            code = pod.exit_code
            if code == 0 and pod.kind == decisive and pod.index == 0:
                assert self.tfjob["spec"]["runPolicy"]["cleanPodPolicy"] in ("Running", "All")
                self.finish("Complete")
                return
            if code:
                assert specs[pod.kind]["restartPolicy"] == "ExitCode"
                if code < 128:
                    self.finish("Failed", f"{pod.name}: {code}")
                    return
                self.restarts += 1
                self.replace(pod, self._pod(pod.kind, pod.index))
