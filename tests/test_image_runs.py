"""The compiled pipeline in containers of the built image, by a real Docker engine: `make image-test` builds it first."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY

from pipelines.config import Config
from pipelines.targets.containers import RUN_LABEL
from pipelines.targets.local import run
from pipelines.targets.output import Display
from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, BadInput
from trainer.storage import list_names, read_json

pytestmark = [pytest.mark.image, pytest.mark.slow]

SMALL = {
    "name": "tiny",
    "seed": 3,
    "train": {"model": "mlp", "epochs": 2},
    "evaluate": {"thresholds": {"accuracy": {"value_threshold": 0.2}}},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The root of the runs in containers."""
    return tmp_path_factory.mktemp("root")


def in_containers(image, root, **changes):
    config = Config.model_validate(SMALL | {"cluster": {"image": image}} | changes)
    return run(config, root, "docker", Display(io.StringIO()))


def test_the_same_pipeline_gives_the_same_metrics_in_containers_whose_root_is_a_bucket(
    engine, image, call, tmp_path, gcs, monkeypatch
):
    here = run(Config.model_validate(SMALL), tmp_path / "root", "subprocess", Display(io.StringIO()))
    monkeypatch.chdir(tmp_path)  # what is worked on stands in output/ here
    there = in_containers(image, f"{gcs}/root")
    assert (here.exit_code, there.exit_code) == (0, 0), (here.message, there.message)
    assert there.document["verdict"] == here.document["verdict"] == "blessed"
    assert there.document["digests"]["examples"] == here.document["digests"]["examples"]
    for metric, value in here.document["metrics"]["test"].items():
        assert there.document["metrics"]["test"][metric] == pytest.approx(value, abs=1e-6), metric
    assert set(there.document["seconds"]) == set(here.document["seconds"])
    assert there.document["artifacts"]["pushed_model"].startswith(f"{gcs}/root/models")
    folder = f"{gcs}/root/runs/{Path(there.document['run_dir']).name}"
    assert read_json(f"{folder}/run.json")[0]["state"] == "succeeded"
    assert "saved_model/saved_model.pb" in list_names(f"{folder}/train-model/model")
    # The versions are those of the image, not of whoever started it.
    inside = call("python", "-c", "import json, trainer.provenance as p; print(json.dumps(p.provenance()))").stdout
    for part in ("versions", "source"):
        assert there.document[part] == json.loads(inside)[part]
    assert Path(there.document["artifacts"]["report"]).stat().st_uid == os.getuid()
    assert left(engine) == []


def test_ctrl_c_reaches_the_training_inside(engine, image, root, configuration):
    file = configuration(json.dumps(SMALL | {"train": {"model": "mlp", "epochs": 100_000, "steps_per_loop": 4}}))
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", "run", file, "--runner", "docker", "--root", root, "--json",
         "--set", f"cluster.image={image}"],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stderr:
        if "epoch 1/" in line:
            process.send_signal(2)
            break
    output, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED, errors
    assert "interrupted in train-model: SIGINT after step" in errors
    assert json.loads(output.splitlines()[-1])["state"] == "interrupted"
    assert list((root / "checkpoints").rglob("*.index"))
    assert left(engine) == []


def test_a_task_that_fails_inside_fails_the_run_with_its_own_words(image, root):
    outcome = in_containers(image, root, train={"model": "mlp", "global_batch_size": 5000})
    assert outcome.exit_code == EXIT_BAD_INPUT
    assert "task train-model failed: train.global_batch_size = 5000: the train split has" in outcome.message
    log = Path(outcome.document["run_dir"], "logs", "train-model.log").read_text()
    assert log.count("Executing task 'train-model'") == 1  # a person is looking: no pauses, no further tries


@pytest.mark.parametrize(("program", "code"), [("false", 1), ("true", 0)])
def test_a_container_that_ends_at_once_is_never_taken_for_a_success(engine, image, root, program, code):
    """kfp takes a container that is gone before its exit code is asked for to have succeeded, as `true` says it has."""
    recipe = io.BytesIO(f'FROM {image}\nENTRYPOINT ["{program}"]\n'.encode())
    hasty, _ = engine.images.build(fileobj=recipe, tag="trireme-hasty:test", rm=True)
    try:
        outcome = in_containers("trireme-hasty:test", root)
    finally:
        engine.images.remove(hasty.id, force=True)
    assert outcome.exit_code == EXIT_FAILED
    assert f"prepare-data ended without a word, with exit code {code}: see its log" in outcome.message
    assert outcome.document["state"] == "failed"


def test_gpus_that_the_engine_cannot_hand_out_are_refused_in_one_line(engine, image, root):
    if "nvidia" in engine.info()["Runtimes"]:
        pytest.skip("this engine hands out GPUs")
    before = list(root.rglob("*")), engine.containers.list(all=True)
    with pytest.raises(BadInput, match=r"cluster\.accelerator: this Docker engine does not hand out 1 GPU"):
        in_containers(image, root, cluster={"image": image, "accelerator": {"count": 1}})
    assert (list(root.rglob("*")), engine.containers.list(all=True)) == before


def left(engine):
    """Containers of runs that are still there once the engine had time to remove what ended."""
    for _ in range(50):
        found = engine.containers.list(all=True, ignore_removed=True, filters={"label": RUN_LABEL})
        if not found:
            break
        time.sleep(0.1)
    return found
