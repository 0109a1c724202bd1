"""What a task's container is given, without an engine; with one, see test_image.py."""

import io
import json
import logging
import os
import shutil
import signal
import socketserver
import subprocess
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler

import pytest
import yaml
from conftest import REPOSITORY

from pipelines.config import Config
from pipelines.targets import containers, local
from pipelines.targets.containers import CODE_LABEL, Containers, code_remark
from pipelines.targets.output import Display, TaskOutput
from pipelines.targets.processes import Processes
from pipelines.training import compile_pipeline
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInput, WorldFailure
from trainer.provenance import source


class Engine:
    """Stands for the client of an engine that has the image of this checkout and runs nothing."""

    class images:
        @staticmethod
        def get(_):
            return type("Image", (), {"labels": {CODE_LABEL: source()["digest"]}})

    class containers:
        @staticmethod
        def create(*_, **__):
            """It hands out as many GPUs as are asked for."""
            return type("Container", (), {"start": lambda _: None, "remove": lambda *_, **__: None})()


@pytest.fixture
def options(monkeypatch, tmp_path):
    """The arguments of `docker run` for a configuration."""
    monkeypatch.setattr(containers, "connect", Engine)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def given(**sections):
        config = Config.model_validate({"name": "tiny", **sections})
        return Containers(config, tmp_path / "root", print).runner({"TRIREME_EVENTS": "1"}).container_run_args

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


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """An engine on a socket of its own that answers each request by what its path ends with."""
    given = {"/version": (200, {"ApiVersion": "1.41"}), "/_ping": (200, "OK")}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.client_address = ("", 0)
            if not given:
                return  # the connection breaks
            path = self.path.partition("?")[0]
            found = (answer for end, answer in given.items() if path.endswith(end))
            status, content = next(found, (404, {"message": "No such image"}))
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    socket = tmp_path / "engine.sock"
    with socketserver.UnixStreamServer(str(socket), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{socket}")
        yield given
        server.shutdown()
        thread.join()


def refused(tmp_path, image, kind):
    config = Config.model_validate({"name": "tiny", "cluster": {"image": image}})
    with pytest.raises(kind) as found:
        local.run(config, tmp_path / "root", "docker", Display(io.StringIO()))
    assert not (tmp_path / "root").exists()
    return str(found.value)


def test_an_image_that_cannot_be_had_is_refused_before_anything_is_made(answers, tmp_path):
    assert "has no such image; build it with `make image`" in refused(tmp_path, "trireme:9", BadInput)
    answers["/images/create"] = (404, {"message": "pull access denied for a/b"})
    message = refused(tmp_path, "a/b:1", BadInput)
    assert message == "cluster.image = a/b:1: the Docker engine cannot fetch it: pull access denied for a/b"
    answers["/images/create"] = (500, {"message": "Get https://a/v2/: connection refused\n"})
    message = refused(tmp_path, "a/b:1", WorldFailure)
    assert message == "cluster.image = a/b:1: the Docker engine cannot fetch it: Get https://a/v2/: connection refused"


def test_an_engine_that_answers_with_an_error_is_quoted_in_one_line(answers, tmp_path):
    answers["/images/trireme:9/json"] = (500, {"message": "database is\nlocked"})
    assert refused(tmp_path, "trireme:9", WorldFailure) == "the Docker engine refused: database is locked"


def test_an_engine_that_is_gone_is_named_and_does_not_hide_what_happened(answers, tmp_path):
    answers["/images/trireme:9/json"] = (200, {"Id": "sha256:0", "Config": {"Labels": {}}})
    found = Containers(Config.model_validate({"name": "tiny", "cluster": {"image": "trireme:9"}}), tmp_path, print)
    answers.clear()
    with pytest.raises(Exception, match="Connection aborted") as error:
        found.forward(signal.SIGTERM)
    assert "the Docker engine does not answer any more: look after it and run again" in str(
        found.explained(error.value)
    )
    assert found.end() == []


@pytest.mark.parametrize("name", ["Not An Image", "UPPER:1", "trireme:", "a//", "trireme@sha256:12", "-x", "../x"])
def test_what_is_no_name_of_an_image_is_refused_with_the_configuration(name):
    with pytest.raises(ValueError, match="must be the name of an image"):
        Config.model_validate({"name": "tiny", "cluster": {"image": name}})


@pytest.mark.parametrize(
    "name",
    ["trireme", "trireme:0.1.0", "localhost:5000/a/b_c:x", "europe-docker.pkg.dev/p/r/trireme@sha256:" + "0" * 64,
     "GHCR.io/me/my-image__x:v1.2-cpu"],
)  # fmt: skip
def test_every_usual_name_of_an_image_is_taken(name):
    assert Config.model_validate({"name": "tiny", "cluster": {"image": name}}).cluster.image == name


def test_without_an_engine_the_run_is_refused_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/absent.sock")
    with pytest.raises(BadInput, match=r"no Docker engine answers at unix:.* \(there is no .*absent.sock\)"):
        local.run(Config.model_validate({"name": "tiny"}), tmp_path / "root", "docker", Display(io.StringIO()))
    assert not (tmp_path / "root").exists()


def made(folder, *words):
    """`make` in a folder that has the Makefile and what it reads, and no .git."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, folder)
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True)


def test_another_variant_of_the_image_is_refused(tmp_path):
    done = made(tmp_path, "image", "VARIANT=tpu")
    assert done.returncode == 2
    assert "VARIANT = tpu: must be gpu or cpu" in done.stderr
    assert "docker" not in done.stdout


def test_an_image_of_an_unpacked_archive_claims_no_revision(tmp_path):
    done = made(tmp_path, "--just-print", "image")
    assert "--build-arg REVISION= " in done.stdout


def test_how_a_silent_task_ended_is_said_where_it_is_known(tmp_path):
    output = TaskOutput(tmp_path, Display(io.StringIO()))
    work = local._Run(Config.model_validate({"name": "tiny"}), tmp_path, tmp_path, output, Processes())
    work.output.seconds |= {"prepare-data": 1.0, "train-model": 2.0}
    work.output.task = "train-model"

    def said(*codes):
        work.exit_codes = list(codes)
        return local._explained(work, {"prepare-data": {"status": "succeeded"}}, RuntimeError())[1]

    assert "task train-model ended without a word: killed, perhaps for want of memory" in said()
    assert "killed, perhaps for want of memory" in said(0, 137)
    assert "task train-model ended without a word, with exit code 1: see its log, and whether trireme:0.1.0" in said(
        0, 1
    )
    work.output.close()


def test_after_a_signal_no_task_starts_but_the_last(tmp_path):
    came = []
    output = TaskOutput(tmp_path, Display(io.StringIO()))
    output.starting = partial(local._refuse_more, came)
    log = logging.Logger("kfp")
    log.addHandler(logging.StreamHandler(output))
    log.handlers[0].setFormatter(logging.Formatter("%(levelname)s - %(message)s"))
    log.info("Executing task 'check-serving'")
    came.append(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        log.info("Executing task 'evaluate-model'")
    assert output.task == "check-serving"
    log.info("Executing task 'record-outcome'")
    assert output.task == "record-outcome"
    output.close()
