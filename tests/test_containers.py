"""What a task's container is given, without an engine; with one, see test_image.py."""

import io
import json
import os

import pytest
import yaml

from pipelines.config import Config
from pipelines.targets import containers, local
from pipelines.targets.containers import CODE_LABEL, Containers, code_remark
from pipelines.targets.output import Display, TaskOutput
from pipelines.targets.processes import Processes
from pipelines.training import compile_pipeline
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInput
from trainer.provenance import source


class Engine:
    """Stands for the client of an engine that has the image of this checkout and runs nothing."""

    class images:
        @staticmethod
        def get(_):
            return type("Image", (), {"labels": {CODE_LABEL: source()["digest"]}})


@pytest.fixture
def options(monkeypatch, tmp_path):
    """The arguments of `docker run` for a configuration."""
    monkeypatch.setattr(containers, "connect", Engine)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def given(**sections):
        config = Config.model_validate({"name": "tiny", **sections})
        return Containers(config, tmp_path / "root").runner({"TRIREME_EVENTS": "1"}).container_run_args

    return given


def mounted(options):
    return {mount["Target"]: mount for mount in options["mounts"]}


def test_a_task_belongs_to_the_caller_and_gains_no_rights(options):
    given = options()
    assert given["user"] == f"{os.getuid()}:{os.getgid()}"
    assert given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges"]
    assert "network_mode" not in given
    assert "device_requests" not in given


def test_the_folders_of_a_configuration_are_found_inside_under_their_own_names(options, tmp_path, tfds_data_dir):
    (tmp_path / "registry").mkdir()
    given = mounted(options(push={"registry": str(tmp_path / "registry")}, data={"data_dir": str(tmp_path / "absent")}))
    assert set(given) == {str(tmp_path / "root"), str(tfds_data_dir), str(tmp_path / "registry")}


def test_credentials_are_readable_and_nothing_more(options, tmp_path, monkeypatch):
    file = tmp_path / "key.json"
    file.write_text("{}")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    given = options()
    assert mounted(given)[str(file)]["ReadOnly"]
    assert given["environment"]["GOOGLE_APPLICATION_CREDENTIALS"] == str(file)


@pytest.mark.parametrize(
    ("address", "mode"), [("http://127.0.0.1:4443", "host"), ("http://localhost:1", "host"), ("http://gcs:4443", None)]
)
def test_an_emulator_on_this_machine_is_reached_through_the_hosts_network(options, monkeypatch, address, mode):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    given = options()
    assert given.get("network_mode") == mode
    assert given["environment"]["STORAGE_EMULATOR_HOST"] == address


def test_gpus_are_passed_when_asked_for_with_room_to_exchange_gradients(options):
    given = options(cluster={"accelerator": {"count": 2}}, train={"strategy": "mirrored"})
    (request,) = given["device_requests"]
    assert request["Count"] == 2
    assert request["Capabilities"] == [["gpu"]]
    assert given["shm_size"] == "1g"


def test_a_pipeline_tells_its_training_how_many_gpus_it_asked_for_and_child_processes_take_what_there_is(tmp_path):
    compile_pipeline(Config.model_validate({"name": "tiny", "cluster": {"accelerator": {}}}), tmp_path / "tiny.yaml")
    pipeline = next(yaml.safe_load_all((tmp_path / "tiny.yaml").read_text()))

    def variables():
        executors = pipeline["deploymentSpec"]["executors"]
        return {name: entry["container"].get("env", []) for name, entry in executors.items()}

    asked = variables()
    assert asked.pop("exec-train-model") == [{"name": "TRIREME_NUM_ACCELERATORS", "value": "1"}]
    assert not any(asked.values())
    Processes().adapt(pipeline)
    assert not any(variables().values())


def test_other_code_in_the_image_is_spoken_of():
    here = source()["digest"]
    assert code_remark({CODE_LABEL: here}) is None
    assert "holds other code (0123456789ab) than this checkout" in code_remark({CODE_LABEL: "sha256:0123456789abcdef"})
    assert "does not say which code it holds" in code_remark({})


def test_a_task_without_a_record_of_its_success_fails_the_run(tmp_path):
    """kfp takes a container that is gone before its exit code is asked for to have succeeded."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "tasks").mkdir()
    output = TaskOutput(tmp_path / "logs", Display(io.StringIO()))
    for task in ("prepare-data", "record-outcome"):
        output.write(f"INFO - Executing task '{task}'\nINFO - Task '{task}' finished with status SUCCESS\n")
        (tmp_path / "tasks" / f"{task}.json").write_text(json.dumps({"task": task, "status": "succeeded"}))
    work = local._Run(Config.model_validate({"name": "tiny"}), tmp_path, tmp_path, output, Processes())
    assert local._conclude(work, None).exit_code == EXIT_DONE
    (tmp_path / "tasks" / "record-outcome.json").unlink()
    outcome = local._conclude(work, None)
    assert outcome.exit_code == EXIT_FAILED
    assert outcome.document["state"] == "failed"
    assert "task record-outcome ended without a word" in outcome.message
    output.close()


def test_without_an_engine_the_run_is_refused_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/absent.sock")
    with pytest.raises(BadInput, match=r"no Docker engine answers \(there is no .*absent.sock\)"):
        local.run(Config.model_validate({"name": "tiny"}), tmp_path / "root", "docker", Display(io.StringIO()))
    assert not (tmp_path / "root").exists()
