"""One pod's part: what it brings, where the model goes, and what it ends with for whoever restarts pods."""

import json
import os
import tempfile

import pytest
from small_data import write_dataset

from trainer import storage
from trainer.config import GroupConfig, TrainConfig, parse
from trainer.errors import BadInput, NoRestartLeft
from trainer.launch.worker import (
    RESTART_ATTEMPT,
    RESTARTABLE_EXIT_CODE,
    WorkerRequest,
    exit_code_for_operator,
    train_worker,
)

TRAIN = {"model": "mlp", "model_args": {"hidden_units": [4]}, "epochs": 1, "global_batch_size": 16}


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def request(place, seed=3, **group):
    return WorkerRequest(
        train=parse(TrainConfig, TRAIN), group=GroupConfig(**group), seed=seed, examples=f"{place}/examples",
        model=f"{place}/model", checkpoints=f"{place}/checkpoints",
    ).to_json()  # fmt: skip


def test_a_pod_brings_its_data_and_leaves_the_model_and_nothing_else(gcs, tmp_path, scratch, capsys):
    write_dataset(tmp_path / "examples", train=61, validation=23)
    storage.publish(tmp_path / "examples", f"{gcs}/examples")
    train_worker(request(gcs), {})
    summary, _ = storage.read_json(f"{gcs}/model/train.json")
    assert summary["steps"] == 4
    assert {"model.keras", "saved_model/saved_model.pb"} <= set(storage.list_names(f"{gcs}/model"))
    assert storage.list_names(f"{gcs}/checkpoints") == []
    brought = [path.name for path in scratch.glob("*/examples/*.tfrecord")]
    assert sorted(name.split("-")[0] for name in brought) == ["train", "validation"]

    capsys.readouterr()
    train_worker(request(gcs), {RESTART_ATTEMPT: "1"})  # it was killed before it could say that it was done
    assert (
        capsys.readouterr().out
        == f"{gcs}/model: the model is there already, of an earlier try; nothing is left to do\n"
    )
    with pytest.raises(BadInput, match=r"request.model = gs://.*/model: another model is there already"):
        train_worker(request(gcs, seed=4), {})


def test_the_checkpoints_are_still_there_while_the_model_is_published(tmp_path, scratch, monkeypatch):
    write_dataset(tmp_path / "examples", train=61, validation=23)
    publish, seen = storage.publish, []

    def look(folder, uri):
        seen.extend(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
        publish(folder, uri)

    monkeypatch.setattr(storage, "publish", look)
    train_worker(request(tmp_path), {})
    assert seen == ["step-00000004"]
    assert (tmp_path / "model" / "train.json").is_file()
    assert not (tmp_path / "checkpoints").exists()


def test_a_place_without_a_dataset_is_refused(gcs, scratch):
    with pytest.raises(BadInput, match=r"request.examples = gs://.*/examples: holds no manifest.json"):
        train_worker(request(gcs), {})


def test_a_group_of_another_size_than_the_environment_says_is_refused(scratch):
    config = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 0}}
    with pytest.raises(BadInput, match=r"num_workers = 2, num_parameter_servers = 0: TF_CONFIG describes 3 and 0"):
        train_worker(request("gs://b", num_workers=2), {"TF_CONFIG": json.dumps(config)})
    with pytest.raises(BadInput, match=r"an environment without a cluster .* describes 1 and 0"):
        train_worker(request("gs://b", num_workers=2), {})


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"model": "s3://b/model"}, r'^request.model = "s3://b/model": must be a folder, or gs:// with a bucket'),
        ({"checkpoints": "gs://"}, r'^request.checkpoints = "gs://": must be a folder, or gs:// with a bucket'),
        ({"model": "model"}, r'^request.model = "model": must begin with gs:// or /'),
        ({"model": "gs://b/checkpoints/"}, r"request.model = .*: lies in checkpoints, gs://b/checkpoints"),
        ({"examples": "gs://b/model/data"}, r'^request.examples = "gs://b/model/data": lies in model, gs://b/model;'),
    ],
)
def test_places_that_pods_cannot_share_or_that_are_one_are_refused_before_the_work(scratch, places, message):
    fields = json.loads(request("gs://b")) | places
    with pytest.raises(BadInput, match=message):
        train_worker(json.dumps(fields), {})


def test_a_model_that_could_not_be_written_after_the_training_is_refused_before_it(tmp_path, scratch, monkeypatch):
    write_dataset(tmp_path / "examples", train=61, validation=23)
    (tmp_path / "file").touch()
    fields = json.loads(request(tmp_path))
    for model in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(BadInput, match=r"request.model = .*: .*/file is a file and no folder"):
            train_worker(json.dumps(fields | {"model": str(model)}), {})
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for whoever is not root
    with pytest.raises(BadInput, match=rf"request.model = .*: user \d+ may not write to {tmp_path}$"):
        train_worker(json.dumps(fields), {})


@pytest.mark.parametrize("variable", [RESTART_ATTEMPT, RESTARTABLE_EXIT_CODE])
def test_a_number_that_is_none_is_refused_before_the_work(scratch, variable):
    with pytest.raises(BadInput, match=f"{variable} = 'x': must be a whole number"):
        train_worker(request("gs://b"), {variable: "x"})


def test_a_group_that_was_killed_in_its_last_try_does_not_begin_another(scratch):
    with pytest.raises(NoRestartLeft, match=r"started again 2 times, and cluster\.max_restarts is 2"):
        train_worker(request("gs://b", max_restarts=2), {RESTART_ATTEMPT: "3"})


@pytest.mark.parametrize(
    ("code", "environ", "expected"),
    [
        (0, {RESTART_ATTEMPT: "2"}, 0),
        (2, {RESTART_ATTEMPT: "2"}, 2),
        (143, {RESTART_ATTEMPT: "2"}, 143),
        (1, {RESTART_ATTEMPT: "1"}, 1),
        (1, {RESTART_ATTEMPT: "2"}, 4),
        (1, {}, 1),
        (1, {RESTARTABLE_EXIT_CODE: "138"}, 138),
        (2, {RESTARTABLE_EXIT_CODE: "138"}, 2),
    ],
)
def test_the_exit_code_says_whether_a_restart_may_help_and_is_left(code, environ, expected):
    assert exit_code_for_operator(code, request("gs://b", max_restarts=2), environ) == expected
