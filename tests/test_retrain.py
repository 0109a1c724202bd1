"""Whether to train: the data's digest against the champion's; and what makes a cached result stale."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import REPOSITORY
from kfp import dsl

from components.decide_training import decide_training
from components.fingerprint_data import fingerprint_data
from pipelines.cli import main
from pipelines.config import load_config
from pipelines.training import compile_pipeline
from trainer import outcome, storage
from trainer import tasks as trainer_tasks
from trainer.config import DataConfig, RetrainConfig, Splits
from trainer.data.fingerprint import fingerprint
from trainer.data.manifest import read_manifest
from trainer.registry import Registry

SHARES = Splits(train="80%", validation="10%", test="10%")


@pytest.fixture
def champion(tmp_path, digits_examples):
    """A registry whose champion was trained on the digits."""

    def promote(digest=None):
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "saved_model.pb").write_bytes(b"model")
        registry = Registry(tmp_path / "models", "tiny")
        digest = digest or read_manifest(digits_examples).digest
        version = registry.publish(tmp_path / "export", {"data_digest": digest})
        registry.promote(version.number, None, "test")

    return promote


def decide(tmp_path, digits_examples, **retrain) -> tuple[bool, dict]:
    config = RetrainConfig(when="data_changed", **retrain)
    decision = dsl.Artifact(uri=str(tmp_path / "decision"))
    examples = dsl.Dataset(uri=str(digits_examples))
    answer = decide_training.python_func(
        config.to_json(), "tiny", str(tmp_path / "models"), str(tmp_path), "run", examples, decision
    )
    return answer, json.loads((tmp_path / "decision" / "decision.json").read_text())


def test_without_a_champion_it_trains(tmp_path, digits_examples):
    assert decide(tmp_path, digits_examples)[0] is True


def test_on_the_champions_data_it_does_not_train_and_says_so(tmp_path, digits_examples, champion):
    champion()
    answer, decision = decide(tmp_path, digits_examples)
    assert answer is False
    assert decision["reason"] == "the data is what the champion, version 1, was trained on"
    assert outcome.read(str(tmp_path), "run")["skipped"] == decision


def test_force_trains_all_the_same_and_other_data_always(tmp_path, digits_examples, champion):
    champion()
    assert decide(tmp_path, digits_examples, force=True)[0] is True


def test_on_other_data_it_trains(tmp_path, digits_examples, champion):
    champion("sha256:other")
    answer, decision = decide(tmp_path, digits_examples)
    assert answer is True
    assert "differs from what the champion, version 1" in decision["reason"]
    assert outcome.read(str(tmp_path), "run") == {}


@pytest.fixture
def spec(configuration, tmp_path):
    def compile_with(*settings):
        file = tmp_path / "pipeline.yaml"
        compile_pipeline(load_config(configuration(), settings), file)
        return yaml.safe_load(file.read_text())

    return compile_with


def tasks(spec: dict) -> dict:
    found = dict(spec["root"]["dag"]["tasks"])
    for component in spec["components"].values():
        found |= component.get("dag", {}).get("tasks", {})
    return found


def constant(spec: dict, task: str, parameter: str) -> str:
    return tasks(spec)[task]["inputs"]["parameters"][parameter]["runtimeValue"]["constant"]


def test_code_and_image_are_part_of_the_key_of_what_is_cached(spec, monkeypatch):
    before = spec()
    for task in ("prepare-data", "train-model"):
        assert constant(before, task, "code").endswith(" in trireme:0.1.0")
        assert constant(before, task, "code") != constant(spec("cluster.image=trireme:0.2.0"), task, "code")
    monkeypatch.setattr("pipelines.training.source_digest", lambda: "sha256:other")
    assert constant(spec(), "train-model", "code") == "sha256:other in trireme:0.1.0"


def test_what_depends_on_the_champion_is_never_cached(spec):
    found = tasks(spec("retrain.when=data_changed", "data.data_dir=/data"))
    cached = {name for name, task in found.items() if task.get("cachingOptions", {}).get("enableCache")}
    assert cached >= {"prepare-data", "train-model"}
    own = {"fingerprint-data", "decide-training", "evaluate-model", "judge-model", "push-model", "record-outcome"}
    assert own <= set(found)
    assert not own & cached


def test_a_run_that_is_told_apart_by_its_identifier_is_never_cached(spec):
    """The identifier is another for each run: as a parameter it would undo the cache of whatever gets it."""
    for name, task in tasks(spec("retrain.when=data_changed")).items():
        values = json.dumps(task.get("inputs", {}))
        assert ("pipeline_job_uuid" in values) <= (not task.get("cachingOptions", {}).get("enableCache")), name


def test_a_folder_of_builders_is_looked_at_before_its_preparation_is_taken_from_the_cache(spec):
    found = spec("data.data_dir=gs://bucket/tfds/")
    assert tasks(found)["fingerprint-data"]["inputs"]["parameters"]["data"] == {
        "componentInputParameter": "pipelinechannel--data"
    }
    source = tasks(found)["prepare-data"]["inputs"]["parameters"]["source"]
    assert source["taskOutputParameter"]["producerTask"] == "fingerprint-data"
    assert "fingerprint-data" not in tasks(spec())


def test_a_fingerprint_changes_with_names_sizes_and_content_and_with_nothing_else(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.csv").write_text("one")
    (tmp_path / "a" / "2.txt").write_text("two")
    os.utime(tmp_path / "a" / "1.csv", (1, 1))
    whole, tables = fingerprint(str(tmp_path / "a")), fingerprint(f"{tmp_path}/a/*.csv")
    config = DataConfig(source="csv", path=f"{tmp_path}/a", label_key="x", splits=SHARES)
    assert json.loads(fingerprint_data.python_func(config.to_json(), 7, "/nowhere", "code", "", "")) == {
        "until": None,
        "digest": whole,
    }
    assert fingerprint(f"{tmp_path}/a/") == whole
    (tmp_path / "a" / "2.txt").write_text("changed")
    assert fingerprint(str(tmp_path / "a")) != whole
    assert fingerprint(f"{tmp_path}/a/*.csv") == tables
    one = fingerprint(f"{tmp_path}/a/1.csv")
    (tmp_path / "a" / "1.csv").write_text("ONE")
    assert fingerprint(f"{tmp_path}/a/1.csv") != one
    assert fingerprint(str(tmp_path / "nothing")) == fingerprint(str(tmp_path / "nowhere"))


def test_in_a_bucket_content_counts_and_the_time_does_not(tmp_path, gcs):
    from trainer import storage

    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a").write_text("1")
    storage.publish(tmp_path / "f", f"{gcs}/one")
    first = storage.versions(f"{gcs}/one")["a"]
    storage.publish(tmp_path / "f", f"{gcs}/two")
    assert storage.versions(f"{gcs}/two")["a"] == first
    (tmp_path / "f" / "a").write_text("2")
    storage.publish(tmp_path / "f", f"{gcs}/three")
    assert storage.versions(f"{gcs}/three")["a"] != first


def test_cached_examples_that_were_deleted_are_noticed_before_any_work(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        decide(tmp_path, tmp_path / "empty")
    assert ended.value.code == 1
    assert "holds no manifest.json; if it came from the cache, it was deleted since" in capsys.readouterr().err


def test_force_without_a_condition_is_refused(configuration, capsys):
    assert main(["compile", str(configuration()), "-o", "x.yaml", "--set", "retrain.force=true"]) == 2
    assert "retrain.force = true: changes nothing, since retrain.when is always" in capsys.readouterr().err


@pytest.mark.slow
def test_locally_a_second_run_on_the_same_data_is_skipped_and_succeeds(configuration, tmp_path, capsys):
    """The whole compiled pipeline, with the nested condition and the second YAML document of the pods' settings."""
    file = configuration(
        "name: tiny\ntrain: {model: mlp, epochs: 3}\nretrain: {when: data_changed}\n"
        "evaluate: {thresholds: {accuracy: {value_threshold: 0.1}}}\n"
        "notify: {on: [skipped], channels: [{kind: webhook, secret: nobody}]}\n"
        "cluster: {labels: {team: a}, secrets: [{name: s, path: /secrets/s}], shared_memory: 1Gi, memory: 2Gi}\n"
    )
    documents = []
    for _ in range(2):
        assert main(["run", str(file), "--root", str(tmp_path / "root"), "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    first, second = documents
    assert (first["verdict"], second["verdict"]) == ("blessed", "skipped")
    assert second["reasons"] == ["the data is what the champion, version 1, was trained on"]
    assert "train-model" in first["seconds"]
    assert "train-model" not in second["seconds"]
    log = (Path(second["run_dir"]) / "logs" / "record-outcome.log").read_text()
    assert "TRIREME_NOTIFY_0_URL is not set; nothing was sent" in log


def test_the_schema_for_editors_knows_the_settings_of_operating():
    schema = json.loads((REPOSITORY / "configs" / "schema.json").read_text())
    assert {"retrain", "notify", "schedules", "kubeflow"} <= set(schema["properties"])


def test_prepared_data_that_was_deleted_makes_the_cache_miss_once_and_then_hit_again(gcs, tmp_path, capsys):
    (tmp_path / "a.csv").write_text("x,label\n" + "".join(f"{n},{'ab'[n % 2]}\n" for n in range(40)))
    data = DataConfig(source="csv", path=f"{tmp_path}/a.csv", label_key="label", splits=SHARES).to_json()
    root = f"{gcs}/root"

    def look(run: str) -> str:
        return trainer_tasks.fingerprint_data(data, 7, root, "code", run, "")

    def prepared(answer: str, run: str) -> str:
        """As on a cluster: the artifact's address is in the bucket, and what the task leaves in its pod is uploaded."""
        examples = SimpleNamespace(path=str(tmp_path / run), uri=f"{root}/artifacts/{run}/examples", metadata={})
        trainer_tasks.prepare_data(data, 7, root, answer, examples, "code")
        storage.publish(examples.path, examples.uri)
        return examples.uri

    first = look("run-1")
    place = prepared(first, "run-1")
    assert look("run-2") == first
    storage.delete_prefix(place)
    assert (
        trainer_tasks.fingerprint_data(data, 7, root, "other code", "run-3", "") == first
    )  # of which the cache holds nothing
    third = look("run-3")
    assert third != first
    assert f"{place} was deleted, and the cache would still hand it out" in capsys.readouterr().out
    prepared(third, "run-3")
    assert look("run-4") == third
