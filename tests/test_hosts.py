"""Pods of a TrainJob and of a TFJob as real processes on virtual hosts, their data, checkpoints and model in a bucket."""

import dataclasses
import hashlib
import itertools
import json
import os
import time

import keras
import numpy as np
import pytest
import yaml
from conftest import REPOSITORY
from fake_gcs import make_bucket, start_fake
from kubernetes_objects import OWNER, job_config, trainjob_schema
from pods import TFJobRun, TrainJobRun
from small_data import write_dataset
from virtual_network import Network, missing

from trainer import storage
from trainer.config import GroupConfig, TrainConfig, parse
from trainer.errors import EXIT_BAD_INPUT, EXIT_NO_RESTART_LEFT
from trainer.launch.tfjob import tfjob
from trainer.launch.trainjob import trainjob
from trainer.launch.worker import WorkerRequest
from trainer.loop import fit

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

TRAIN = {
    "model": "small_models:plain", "model_args": {"l2": 0.05}, "epochs": 8, "global_batch_size": 16,
    "learning_rate": 0.01, "clip_global_norm": 0.1, "ema_decay": 0.9, "class_weights": {"one": 2.0}, "keep_best": None,
}  # fmt: skip
LONG = TRAIN | {"epochs": 16, "steps_per_loop": 1, "checkpoint_every_steps": 4}  # long enough to be interrupted


class Site:
    """A network with a bucket that holds a prepared dataset."""

    def __init__(self, network, bucket, folder, environ):
        self.network, self.bucket, self.folder, self.environ = network, bucket, folder, environ
        self._numbers = itertools.count(1)

    def trainjob(self, train, limit=None, workers=2, servers=0, **group):
        """A TrainJob under way: the object that the launcher makes, on the runtime that it names."""
        group = GroupConfig(num_workers=workers, num_parameter_servers=servers, start_timeout_secs=60, **group)
        runtime = runtime_of("tensorflow-parameter-server" if servers else "tensorflow-distributed")
        owner, request = self.owner(), self.request(train, group)
        config = job_config(runtime=runtime["metadata"]["name"])
        job = trainjob(request, config, group, owner, trainjob_schema("runtimePatches"))
        return TrainJobRun(job.manifest, runtime, self.network, self.folder / owner.key, self.environ, limit)

    def tfjob(self, train, **group):
        group = GroupConfig(num_workers=2, start_timeout_secs=60, **group)
        owner, request = self.owner(), self.request(train, group)
        job = tfjob(request, job_config("tfjob"), group, owner)
        return TFJobRun(job.manifest, self.network, self.folder / owner.key, self.environ)

    def owner(self):
        self._number = next(self._numbers)
        return dataclasses.replace(OWNER, key=f"run-{self._number}")

    def request(self, train, group):
        return WorkerRequest(
            train=parse(TrainConfig, train | {"strategy": "auto"}), group=group, seed=3,
            examples=f"{self.bucket}/examples", model=f"{self.bucket}/run-{self._number}/model",
            checkpoints=f"{self.bucket}/run-{self._number}/checkpoints",
        ).to_json()  # fmt: skip

    def model(self, run):
        """Weights and summary of what a run published."""
        target = run.folder / "model"
        with self.network.inside():
            storage.stage(f"{self.bucket}/{run.folder.name}/model", target)
        weights = keras.models.load_model(target / "model.keras", compile=False).get_weights()
        return weights, json.loads((target / "train.json").read_text())

    def left_of_checkpoints(self, run):
        with self.network.inside():
            return storage.list_names(f"{self.bucket}/{run.folder.name}/checkpoints")


def runtime_of(name):
    return yaml.safe_load((REPOSITORY / "manifests" / f"{name}.yaml").read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    write_dataset(folder / "examples", train=61, validation=23, shards=2)
    before = os.environ.get("STORAGE_EMULATOR_HOST")
    with Network(folder) as network:
        with network.inside():
            server, address = start_fake(folder / "server.log", network.address)
            os.environ["STORAGE_EMULATOR_HOST"] = address
            make_bucket(address, "bucket")
            storage.publish(folder / "examples", "gs://bucket/examples")
        environ = {"STORAGE_EMULATOR_HOST": address, "TF_CPP_MIN_LOG_LEVEL": "2"}
        try:
            yield Site(network, "gs://bucket", folder, environ)
        finally:
            server.kill()
            server.wait()
            os.environ.pop("STORAGE_EMULATOR_HOST")
            if before is not None:
                os.environ["STORAGE_EMULATOR_HOST"] = before


@pytest.fixture(scope="module")
def one_machine(site):
    """Weights that one process trains."""
    found = {}

    def weights(train):
        key = hashlib.sha256(json.dumps(train).encode()).hexdigest()[:8]
        if key not in found:
            folder = site.folder / f"alone-{key}"
            fit(parse(TrainConfig, train), 3, site.folder / "examples", folder, site.folder / f"checkpoints-{key}")
            found[key] = keras.models.load_model(folder / "model.keras", compile=False).get_weights()
        return found[key]

    return weights


def difference(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def test_two_pods_train_what_one_machine_trains_and_send_each_gradient_once(site, one_machine):
    # Many bytes; and without Adam, which would make much of the last bit of so many small gradients.
    train = TRAIN | {"model_args": {"units": 20_000}, "optimizer": "sgd"}
    with site.trainjob(train) as run:
        assert run.wait() == "Complete", run.report()
        sent = run.pods[1].host.sent_bytes()  # the chief sends checkpoints besides
        weights, summary = site.model(run)
    assert (summary["num_workers"], summary["num_replicas"], summary["steps"]) == (2, 2, 32)
    assert difference(weights, one_machine(train)) < 1e-6
    assert "the model is in gs://" in run.report()
    assert site.left_of_checkpoints(run) == []
    assert run.num_killed == 0
    gradients = 4 * summary["num_parameters"] * 32
    assert gradients < sent < 1.25 * gradients


def test_four_pods_that_a_slow_network_joins_train_the_same(site, one_machine):
    with site.trainjob(TRAIN, limit="10mbit", workers=4) as run:
        assert run.wait() == "Complete", run.report()
        weights, summary = site.model(run)
    assert summary["num_replicas"] == 4
    assert difference(weights, one_machine(TRAIN)) < 1e-6


def test_a_killed_pod_restarts_the_set_which_resumes_from_the_bucket_on_fresh_machines(site, one_machine):
    created = time.monotonic()
    with site.trainjob(LONG, max_restarts=1) as run:
        run.wait_for("epoch 1/16")
        start_secs = time.monotonic() - created
        run.wait_for("epoch 3/16")
        addresses = [pod.host.address for pod in run.pods]
        began = time.monotonic()
        run.pods[0].kill()  # the chief, which comes back elsewhere under its old name
        run.wait_for("resuming after step")
        run.wait_for("loss")
        seconds = time.monotonic() - began
        assert run.restarts == 1
        assert not {pod.host.address for pod in run.pods} & set(addresses)
        assert run.wait() == "Complete", run.report()
        weights, summary = site.model(run)
    print(f"from creation to the first epoch's end {start_secs:.1f} s, from the kill to training again {seconds:.1f} s")
    assert seconds < max(30, 2 * start_secs + 18)  # where the machine is busy the first start took long too
    assert summary["resumed_after_step"] >= 4
    assert difference(weights, one_machine(LONG)) < 1e-5  # 64 steps


def test_a_pod_that_is_cut_off_is_named_and_without_a_restart_left_the_set_fails_at_once(site):
    with site.trainjob(LONG, max_restarts=0) as run:
        run.wait_for("epoch 2/16")
        began = time.monotonic()
        run.pods[1].host.unplug()
        assert run.wait() == "Failed"
        assert time.monotonic() - began < 40
    chief = run.pods[0]
    assert (run.reason, run.restarts, chief.exit_code) == ("PodFailurePolicy", 0, EXIT_NO_RESTART_LEFT)
    name = run.jobset["metadata"]["name"]
    assert f"worker 0 lost its peer: worker 1 ({name}-node-0-1.{name}:2222)" in chief.lines[-1]


def test_parameter_servers_train_and_are_ended_when_the_chief_is_done(site):
    train = {
        "model": "mlp", "model_args": {"hidden_units": [16]}, "epochs": 12, "global_batch_size": 16,
        "learning_rate": 0.01, "keep_best": None,
    }  # fmt: skip
    with site.trainjob(train, servers=1) as run:
        assert run.wait() == "Complete", run.report()
        _, summary = site.model(run)
        history = (run.folder / "model" / "history.jsonl").read_text().splitlines()
    assert [pod.exit_code for pod in run.pods] == [0, 143, 143, 143]
    assert run.num_killed == 0
    assert (summary["steps"], summary["num_workers"]) == (12 * 4, 2)
    assert json.loads(history[-1])["num_examples"] == 61
    assert json.loads(history[-1])["validation_accuracy"] > 0.6


def test_what_cannot_work_is_not_started_again(site):
    with site.trainjob(TRAIN | {"global_batch_size": 62}) as run:
        assert run.wait() == "Failed"
    assert (run.reason, run.restarts) == ("PodFailurePolicy", 0)
    failed = next(pod for pod in run.pods if pod.exit_code == EXIT_BAD_INPUT)
    assert failed.lines[-1] == "trainer: train.global_batch_size = 62: the train split has 61 examples"


def test_pods_of_a_tfjob_are_started_again_one_by_one_until_they_train_together(site, one_machine):
    with site.tfjob(LONG, max_restarts=1) as run:
        run.wait_for("epoch 3/16")
        run.pods[1].kill()
        run.wait_for("resuming after step")
        assert run.wait() == "Complete", run.report()
        weights, _ = site.model(run)
    assert next(pod.exit_code for pod in run.past if pod.index == 1) == 137
    assert 138 in [pod.exit_code for pod in run.past]  # the peer, which lost it
    assert difference(weights, one_machine(LONG)) < 1e-5
