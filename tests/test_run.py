"""`trireme run` as a person runs it: the compiled pipeline on real data, in processes of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY

TINY = """\
name: tiny
seed: 3
data: {splits: {train: "train[:300]", validation: "train[300:340]", test: "test[:80]"}}
train: {model: mlp, epochs: 8, learning_rate: 3e-3}
evaluate:
  thresholds: {accuracy: {value_threshold: 0.5, change_threshold: -0.2}}
  own_metrics: {cost: {function: "shop:cost", lower_is_better: true}}
"""


def trireme(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *map(str, words)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500,
        **options,
    )


@contextlib.contextmanager
def started(*words):
    """A run in a session of its own, none of which outlives the block."""
    with subprocess.Popen(
        # A shell that runs the tests in the background has them, and all their children, ignore Ctrl-C.
        ["env", "--default-signal=INT", sys.executable, "-m", "pipelines.cli", *map(str, words)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(process, text):
    """Reads the process's errors until a line holds the text."""
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return
    pytest.fail("".join(seen))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "tiny.yaml"
    file.write_text(TINY)
    (file.parent / "shop.py").write_text(
        "def cost(labels, answers): return float((answers.argmax(1) != labels).mean())\n"
    )
    return file


@pytest.fixture(scope="module")
def blessed(file, tmp_path_factory):
    """The document of a run whose model was promoted, and what the terminal showed."""
    root = tmp_path_factory.mktemp("root")
    done = trireme("run", file, "--root", root, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done, root


def test_the_push_branch_ran_and_the_document_says_what_came_out(blessed):
    document, _, root = blessed
    assert document["verdict"] == "blessed"
    assert document["reasons"]
    assert document["metrics"]["test"]["accuracy"] >= 0.5
    measured = ["check-serving", "evaluate-model"]  # neither waits for the other
    tasks = ["prepare-data", "train-model", *measured, "judge-model", "push-model", "record-outcome"]
    done = list(document["seconds"])
    assert [*done[:2], *sorted(done[2:4]), *done[4:]] == [*tasks, "total"]
    assert document["artifacts"]["pushed_model"] == str(root / "models" / "tiny" / "1")
    assert all(Path(path).exists() for path in document["artifacts"].values())
    assert document["digests"]["examples"].startswith("sha256:")
    assert document["config"]["train"]["epochs"] == 8
    assert document["versions"]["kfp"]
    assert document["source"]["digest"].startswith("sha256:")


def test_a_module_beside_the_configuration_file_is_found_by_the_tasks(blessed):
    metrics = blessed[0]["metrics"]["test"]
    assert metrics["cost"] == pytest.approx(1.0 - metrics["accuracy"])


def test_the_same_document_is_in_the_run_directory_and_so_are_logs_and_report(blessed):
    document, _, _ = blessed
    folder = Path(document["run_dir"])
    assert json.loads((folder / "run.json").read_text()) == document
    assert "epoch 8/8" in (folder / "logs" / "train-model.log").read_text()
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert (folder / "pipeline.yaml").read_text().startswith("# PIPELINE DEFINITION")
    assert not (folder / "tmp").exists()


def test_a_person_sees_verdict_metrics_seconds_and_paths(blessed):
    document, done, _ = blessed
    for shown in ("blessed", "accuracy", "train-model", document["artifacts"]["report"], document["run_dir"]):
        assert shown in done.stdout
    assert "train-model: epoch 1/8: loss" in done.stderr
    assert "KFP Executor" not in done.stderr + done.stdout


def test_a_raised_threshold_keeps_the_push_branch_from_running(blessed, file):
    _, _, root = blessed
    raised = "evaluate.thresholds.accuracy.value_threshold=1.0"
    done = trireme("run", file, "--root", root, "--json", "--set", raised, "--fail-unless-blessed")
    document = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 3
    assert document["verdict"] == "not_blessed"
    assert "push-model" not in document["seconds"]
    assert document["artifacts"]["pushed_model"] is None
    assert "record-outcome" in document["seconds"]
    assert [entry.name for entry in (root / "models" / "tiny").iterdir() if entry.name.isdigit()] == ["1"]
    assert any("champion version 1" in reason for reason in document["reasons"])
    assert "reusing the prepared data " + document["digests"]["examples"] in done.stderr


def test_a_training_of_many_pods_runs_on_this_machine_as_it_stands_with_the_same_metrics(blessed, file):
    settings = ("cluster.launcher=trainjob", "cluster.num_workers=2", "train.strategy=multi_worker_mirrored")
    words = [word for setting in settings for word in ("--set", setting)]
    done = trireme("run", file, "--root", blessed[2], "--json", *words)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert "train-distributed" in document["seconds"]
    assert "train-model" not in document["seconds"]
    for metric, value in blessed[0]["metrics"]["test"].items():
        assert document["metrics"]["test"][metric] == pytest.approx(value, abs=1e-5), metric
    assert (Path(document["artifacts"]["model"]) / "train.json").is_file()
    assert "train-model:" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "task", "message"),
    [
        ("data.name=digitz", "prepare-data", 'data.name = "digitz": no such dataset; did you mean digits?'),
        ("data.splits.test=tests", "prepare-data", 'data.splits.test = "tests"'),
        (
            "train.global_batch_size=301",
            "train-model",
            "train.global_batch_size = 301: the train split has 300 examples",
        ),
    ],
)
def test_bad_input_that_only_a_task_can_find_ends_with_one_message_and_exit_code_2(
    blessed, file, setting, task, message
):
    done = trireme("run", file, "--root", blessed[2], "--set", setting)
    assert done.returncode == 2
    error, log = [line for line in done.stderr.splitlines() if line.startswith("trireme: ")]
    assert f"task {task} failed: {message}" in error
    assert "Traceback" not in done.stderr + done.stdout
    assert "Traceback" in Path(log.split("log: ")[1]).read_text()


CRASHING = """
import keras
import trainer.models.cnn as ours


class Reef(keras.layers.Layer):
    def call(self, x, training=False):
        if training:
            raise RuntimeError("a wave")
        return x


def build(spec):
    model = ours.build(spec)
    return keras.Model(model.inputs, Reef()(model.outputs[0]))
"""


def test_a_task_that_crashes_is_named_with_its_cause_and_its_log(blessed, file, tmp_path, monkeypatch):
    (tmp_path / "crashing_model.py").write_text(CRASHING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{REPOSITORY}")
    done = trireme("run", file, "--root", blessed[2], "--json", "--set", "train.model=crashing_model:build")
    document = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert "task train-model failed: RuntimeError: a wave" in done.stderr
    assert document["state"] == "failed"
    assert document["verdict"] is None
    assert document["artifacts"]["model"] is None
    assert "evaluate-model" not in document["seconds"]
    assert "record-outcome" in document["seconds"]  # the exit task ran all the same


def test_a_preempted_run_ends_with_143_and_the_next_one_goes_on(blessed, file):
    root = blessed[2]
    longer = ["run", file, "--root", root, "--set", "train.epochs=1500", "--set", "train.checkpoint_every_steps=20"]
    with started(*longer) as process:
        wait_for(process, "epoch 2/")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 143
        assert "task train-model failed: SIGTERM after step" in errors
    with started(*longer) as process:
        wait_for(process, "resuming after step")


@pytest.mark.parametrize("moment", ["prepare-data …", "epoch 1/", "evaluate-model …"])
def test_ctrl_c_names_the_task_and_leaves_nothing_half_written(blessed, file, moment):
    root = blessed[2]
    epochs = "train.epochs=1600" if moment.startswith("epoch") else "train.epochs=1"
    with started("run", file, "--root", root, "--set", epochs) as process:
        wait_for(process, moment)
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everyone in the foreground
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    task = "train-model" if moment.startswith("epoch") else moment.split()[0]
    assert f"trireme: interrupted in {task}" in errors
    assert "Traceback" not in errors
    run = max((root / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
    assert json.loads((run / "run.json").read_text())["state"] == "interrupted"
    for half in ("examples", "model"):
        for folder in run.glob(f"*/*/{half}"):
            assert (folder / "manifest.json").exists() or (folder / "train.json").exists()
    assert not [path for path in run.rglob(".*") if path.name.startswith((".examples-", ".model-"))]


def test_a_root_that_cannot_be_written_is_refused(file, tmp_path):
    (tmp_path / "file").write_text("")
    done = trireme("run", file, "--root", tmp_path / "file" / "root")
    assert done.returncode == 2
    assert "trireme: --root = " in done.stderr
    assert "cannot be written: Not a directory" in done.stderr


@pytest.mark.parametrize(
    "size", ["150k", "400k", "1200k"]
)  # full in the preparation, early and late, and in the export
def test_a_full_disk_is_named_and_leaves_nothing_that_looks_whole(file, tmp_path, size):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        done = trireme("run", file, "--root", tmp_path / "root")
        assert done.returncode == 1
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
        assert not list((tmp_path / "root" / "models").rglob("saved_model.pb"))
        assert not list((tmp_path / "root").rglob("train.json"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_configuration_that_is_wrong_starts_nothing(file, tmp_path):
    done = trireme("run", file, "--root", tmp_path / "root", "--set", "train.epohs=3")
    assert done.returncode == 2
    assert done.stderr == "trireme: --set: train.epohs = 3: unknown key; did you mean epochs?\n"
    assert not (tmp_path / "root").exists()


def test_check_says_what_was_looked_at(file):
    done = trireme("check", file, "--json")
    assert done.returncode == 0
    assert {finding["subject"] for finding in json.loads(done.stdout)} >= {"configuration", "dataset", "image"}
    done = trireme("check", file, "--set", "cluster.image=trireme:latest")
    assert done.returncode == 2
    assert "names no fixed version" in done.stdout
