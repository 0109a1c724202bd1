"""The step's mathematics: one global batch, one update, however many replicas share it; and a run goes on where it stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import REPOSITORY

WORKER = """
import json, sys
from pathlib import Path
import keras
from trainer.config import TrainConfig, parse
from trainer.loop import fit
config, examples, folder, checkpoints = sys.argv[1:]
fit(parse(TrainConfig, json.loads(config)), 7, Path(examples), Path(folder), Path(checkpoints))
"""
# 1,293 examples: with a batch of 100 the last of an epoch has 93, which neither 2 nor 3 replicas share evenly.
COMMON = {"model": "mlp", "epochs": 3, "global_batch_size": 100, "keep_best": None}


def command(config, examples, folder):
    checkpoints = folder.with_name(folder.name + ".checkpoints")
    return [sys.executable, "-c", WORKER, json.dumps(COMMON | config), str(examples), str(folder), str(checkpoints)]


def trained(config, examples, folder):
    """Weights after a training in a process of its own, and its history."""
    subprocess.run(command(config, examples, folder), cwd=REPOSITORY, check=True, capture_output=True)
    return weights_of(folder), history_of(folder)


def weights_of(folder):
    import keras

    return keras.saving.load_model(folder / "model.keras", compile=False).get_weights()


def history_of(folder):
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def furthest(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def reference(digits_examples, tmp_path_factory):
    return trained({}, digits_examples, tmp_path_factory.mktemp("reference") / "model")


def test_two_mirrored_replicas_end_with_the_weights_of_one_device(reference, digits_examples, tmp_path):
    weights, history = trained({"strategy": "mirrored", "num_virtual_devices": 2}, digits_examples, tmp_path / "model")
    assert history[-1]["step"] == 39
    assert furthest(weights, reference[0]) <= 1e-6
    assert furthest(weights, [np.zeros_like(value) for value in weights]) > 0.1


def test_a_second_run_gives_the_same_numbers(reference, digits_examples, tmp_path):
    weights, history = trained({}, digits_examples, tmp_path / "model")
    assert furthest(weights, reference[0]) == 0.0
    assert history == reference[1]


def test_a_killed_training_goes_on_and_ends_with_the_same_weights(reference, digits_examples, tmp_path):
    folder = tmp_path / "model"
    checkpoints = tmp_path / "model.checkpoints"
    process = subprocess.Popen(
        command({"checkpoint_every_steps": 5, "steps_per_loop": 1}, digits_examples, folder),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while not list(checkpoints.glob("step-0000001[05]")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not folder.exists()
    weights, history = trained({"checkpoint_every_steps": 5, "steps_per_loop": 1}, digits_examples, folder)
    assert json.loads((folder / "train.json").read_text())["resumed_after_step"] >= 10
    assert furthest(weights, reference[0]) == 0.0
    assert [row["step"] for row in history] == [13, 26, 39]
    losses, expected = ([row["loss"] for row in rows] for rows in (history, reference[1]))
    assert losses == pytest.approx(expected, rel=1e-12)  # added up in other groups, so not to the last bit
    assert not checkpoints.exists()


def test_sigterm_leads_to_a_checkpoint_and_the_exit_code_of_a_preempted_process(digits_examples, tmp_path):
    words = ["train", "configs/digits.yaml", "--set", "train.epochs=2000", "--set", "train.model=mlp"]
    output = tmp_path / "model"
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *words, "--examples", str(digits_examples), "--output", str(output)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    for line in process.stdout:
        if line.startswith("epoch 2/"):
            break
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "saved; the next run goes on from there" in errors
    assert not output.exists()
    assert list((tmp_path / "model.checkpoints").glob("step-*/state.json"))


def test_a_damaged_checkpoint_is_passed_over_and_one_of_another_configuration_refused(digits_examples, tmp_path):
    from trainer.checkpoint import Checkpoints, State
    from trainer.config import TrainConfig
    from trainer.data.manifest import read_manifest
    from trainer.errors import BadInput
    from trainer.models import build_model
    from trainer.objective import objective_of
    from trainer.spec import spec_of
    from trainer.step import Trainer
    from trainer.strategy import build_strategy

    config = TrainConfig(model="mlp")
    spec = spec_of(read_manifest(digits_examples), digits_examples)

    spec = spec_of(read_manifest(digits_examples), digits_examples)

    def trainer():
        return Trainer(
            build_strategy(config), lambda: build_model(config, spec), config, objective_of(spec, config), 10
        )

    writer = Checkpoints(tmp_path, trainer(), {"train.model": "mlp"}, keep=2)
    with writer:
        for step in (1, 2, 3, 4):
            writer.save(State(step=step, best_step=1))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (1, 3, 4)]
    data = next((tmp_path / "step-00000004").glob("*.data-*"))
    data.write_bytes(data.read_bytes()[:-7])
    assert Checkpoints(tmp_path, trainer(), {"train.model": "mlp"}, keep=2).restore() == State(step=3, best_step=1)
    shutil.rmtree(tmp_path / "step-00000003" / "variables.index", ignore_errors=True)
    (tmp_path / "step-00000003" / "state.json").write_text("{")
    assert Checkpoints(tmp_path, trainer(), {"train.model": "mlp"}, keep=2).restore() == State(step=1, best_step=1)
    with pytest.raises(BadInput, match=r'train\.model = "cnn": the checkpoints in .* were made with "mlp"'):
        Checkpoints(tmp_path, trainer(), {"train.model": "cnn"}, keep=2).restore()
