"""A group of real processes trains what one process trains: same weights, same step at SIGTERM, no worker that matters alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest
from small_data import write_dataset

from trainer.config import GroupConfig, TrainConfig, parse
from trainer.errors import BadInput, WorldFailure
from trainer.launch.training import train_as_group
from trainer.loop import fit

pytestmark = pytest.mark.slow

EVERYTHING = {
    "model": "small_models:plain", "model_args": {"l2": 0.05}, "epochs": 8, "global_batch_size": 16,
    "learning_rate": 0.01, "clip_global_norm": 0.1, "gradient_accumulation_steps": 2, "ema_decay": 0.9,
    "class_weights": {"one": 2.0}, "keep_best": None, "nan_policy": "skip_step",
}  # fmt: skip
TWO = GroupConfig(num_workers=2, max_restarts=0, start_timeout_secs=120)


@pytest.fixture(scope="module", autouse=True)
def models_on_the_path():
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups") / "examples"
    write_dataset(folder, train=61, validation=23, shards=1)  # one file for two workers
    return folder


def weights(folder):
    return keras.models.load_model(folder / "model.keras", compile=False).get_weights()


def difference(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def rows(folder):
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("more", [{}, {"cache_bytes": 0}, {"model_args": {"batch_norm": "plain"}, "sync_batch_norm": True, "gradient_accumulation_steps": 1, "learning_rate": 0.001}], ids=["memory", "streamed", "batch norm"])  # fmt: skip
def test_two_workers_give_the_weights_of_one_process(examples, tmp_path, more, capfd):
    alone = parse(TrainConfig, EVERYTHING | more)
    together = parse(TrainConfig, EVERYTHING | more | {"strategy": "multi_worker_mirrored"})
    fit(alone, 3, examples, tmp_path / "alone", tmp_path / "c1")
    summary = train_as_group(together, 3, examples, tmp_path / "together", tmp_path / "c2", TWO)
    assert (summary["num_replicas"], summary["num_workers"], summary["steps"]) == (2, 2, 32)
    assert difference(weights(tmp_path / "alone"), weights(tmp_path / "together")) < 1e-6
    for one, other in zip(rows(tmp_path / "alone"), rows(tmp_path / "together"), strict=True):
        assert one["num_examples"] == other["num_examples"] == 61
        assert one["validation_loss"] == pytest.approx(other["validation_loss"], abs=1e-5)
    said = capfd.readouterr().out.splitlines()
    assert (
        len([line for line in said if "epoch 8/8: loss" in line]) == 2
    )  # once alone, once by the chief: others are quiet
    assert not (tmp_path / "c2").exists()


def start(config, examples, folder, checkpoints):
    program = (
        "import sys; from pathlib import Path; from trainer.config import *; from trainer.errors import *\n"
        "from trainer.launch.training import train_as_group\n"
        "train, examples, folder, checkpoints = sys.argv[1:]\n"
        "try:\n"
        "    train_as_group(parse_json(TrainConfig, train), 3, *map(Path, (examples, folder, checkpoints)),\n"
        "                   GroupConfig(num_workers=2, max_restarts=0, grace_period_secs=60))\n"
        "except TriremeError as error:\n"
        "    print(error); sys.exit(error.exit_code)\n"
    )
    words = [config.to_json(), str(examples), str(folder), str(checkpoints)]
    return subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("whom", ["launcher", "worker 1"])
def test_sigterm_stops_all_workers_at_one_step_and_the_next_run_ends_as_if_nothing_had_been(examples, tmp_path, whom):
    settings = EVERYTHING | {"model_args": {"dropout": 0.2}, "epochs": 300, "steps_per_loop": 1}
    config = parse(TrainConfig, settings | {"strategy": "multi_worker_mirrored"})
    process = start(config, examples, tmp_path / "model", tmp_path / "checkpoints")
    try:
        for line in process.stdout:
            if "epoch 2/300: loss" in line:
                break
        time.sleep(0.3)
        if whom == "launcher":
            process.send_signal(signal.SIGTERM)
        else:
            workers = [
                child
                for child in psutil.Process(process.pid).children(recursive=True)
                if '"index": 1' in child.environ().get("TF_CONFIG", "")
            ]
            workers[0].send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(60) == 143, rest
    finally:
        process.kill()
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))[-1]
    step = json.loads((newest / "state.json").read_text())["state"]["step"]
    assert step >= 8
    assert f"after step {step:,}: saved" in rest or whom == "launcher"
    assert not (tmp_path / "model").exists()
    # Fewer epochs are another configuration, so that the comparison need not train 300.
    for name in ("state.json",):
        for folder in (tmp_path / "checkpoints").glob("step-*"):
            content = json.loads((folder / name).read_text())
            content["identity"]["train.epochs"] = 24
            (folder / name).write_text(json.dumps(content))
    short = parse(TrainConfig, settings | {"strategy": "multi_worker_mirrored", "epochs": 24})
    if step > 24 * 4:
        pytest.skip(f"the machine trained {step} steps before the signal came")
    summary = train_as_group(short, 3, examples, tmp_path / "resumed", tmp_path / "checkpoints", TWO)
    assert summary["resumed_after_step"] == step
    train_as_group(short, 3, examples, tmp_path / "whole", tmp_path / "fresh", TWO)
    assert difference(weights(tmp_path / "resumed"), weights(tmp_path / "whole")) == 0.0


def test_a_group_that_dies_is_started_again_and_ends_with_the_same_weights(examples, tmp_path):
    settings = EVERYTHING | {"strategy": "multi_worker_mirrored", "epochs": 40, "steps_per_loop": 1}
    config = parse(TrainConfig, settings)
    killed = []

    def kill_worker():
        for child in psutil.Process().children(recursive=True):
            if '"index": 1' in child.environ().get("TF_CONFIG", ""):
                child.kill()
                killed.append(child.pid)

    import trainer.launch.training as launching

    def watching_group(*args, emit, **more):
        def watch(source, line):
            if not killed and "epoch 3/40: loss" in line:
                kill_worker()
            emit(source, line)

        return group(*args, emit=watch, **more)

    group, launching.run_group = launching.run_group, watching_group
    try:
        summary = train_as_group(
            config, 3, examples, tmp_path / "model", tmp_path / "c1", TWO.model_copy(update={"max_restarts": 1})
        )
    finally:
        launching.run_group = group
    assert killed
    assert summary["resumed_after_step"] >= 8
    fit(parse(TrainConfig, settings | {"strategy": "default"}), 3, examples, tmp_path / "alone", tmp_path / "c2")
    assert difference(weights(tmp_path / "alone"), weights(tmp_path / "model")) < 1e-5  # 160 steps


def test_a_fault_of_one_worker_is_reported_under_its_name_and_with_its_words(examples, tmp_path):
    config = parse(TrainConfig, EVERYTHING | {"strategy": "multi_worker_mirrored", "optimizer_args": {"beta": 1}})
    with pytest.raises(BadInput, match=r"worker \d ended with exit code 2: train.optimizer_args"):
        train_as_group(config, 3, examples, tmp_path / "model", tmp_path / "c", TWO)


def test_a_strategy_for_one_process_is_refused_before_anybody_is_waited_for(examples, tmp_path):
    began = time.monotonic()
    config = parse(TrainConfig, EVERYTHING | {"strategy": "mirrored"})
    with pytest.raises(BadInput, match="trains in one process, and the cluster has 2 workers"):
        train_as_group(config, 3, examples, tmp_path / "model", tmp_path / "c", TWO)
    assert time.monotonic() - began < 60


SERVERS = GroupConfig(num_workers=2, num_parameter_servers=1, max_restarts=2, start_timeout_secs=120)


@pytest.mark.parametrize("kill", [None, "worker", "ps"])
def test_parameter_servers_reach_the_accuracy_of_the_synchronous_run(examples, tmp_path, kill, capfd):
    settings = {
        "model": "mlp", "model_args": {"hidden_units": [16]}, "epochs": 40, "global_batch_size": 16,
        "learning_rate": 0.01, "keep_best": None, "checkpoint_every_steps": 16,
    }  # fmt: skip
    config = parse(TrainConfig, settings | {"strategy": "parameter_server"})
    import trainer.launch.training as launching

    killed = []

    def watching_group(*args, emit, **more):
        def watch(source, line):
            if kill and not killed and "epoch 10/40: loss" in line:
                for child in psutil.Process().children(recursive=True):
                    task = json.loads(child.environ().get("TF_CONFIG", "{}")).get("task", {})
                    if task == {"type": kill, "index": 0}:
                        child.kill()
                        killed.append(child.pid)
            emit(source, line)

        return group(*args, emit=watch, **more)

    group, launching.run_group = launching.run_group, watching_group
    try:
        summary = train_as_group(config, 3, examples, tmp_path / "model", tmp_path / "c", SERVERS)
    finally:
        launching.run_group = group
    assert bool(killed) == bool(kill)
    fit(parse(TrainConfig, settings), 3, examples, tmp_path / "alone", tmp_path / "c2")
    synchronous, asynchronous = rows(tmp_path / "alone")[-1], rows(tmp_path / "model")[-1]
    assert asynchronous["num_examples"] == 61  # each step's examples are counted once, a lost worker's too
    assert summary["steps"] == 40 * 4
    assert (summary["resumed_after_step"] is not None) == (kill == "ps")
    assert asynchronous["validation_accuracy"] > synchronous["validation_accuracy"] - 0.15


def test_parameter_servers_refuse_a_split_that_does_not_fit(examples, tmp_path):
    config = parse(TrainConfig, EVERYTHING_ASYNCHRONOUS | {"cache_bytes": 0})
    with pytest.raises(BadInput, match=r"the train split; it has [\d,]+ bytes|holds the train split in memory"):
        train_as_group(config, 3, examples, tmp_path / "model", tmp_path / "c", SERVERS)


EVERYTHING_ASYNCHRONOUS = {"model": "mlp", "epochs": 1, "global_batch_size": 16, "strategy": "parameter_server"}


def test_a_worker_that_never_starts_is_named(examples, tmp_path):
    from test_rendezvous import free_addresses

    addresses = free_addresses(2)
    tf_config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    file = tmp_path / "training.json"
    train = EVERYTHING | {"strategy": "multi_worker_mirrored"}
    file.write_text(json.dumps({"seed": 3, "train": train, "cluster": {"num_workers": 2, "start_timeout_secs": 3.0}}))
    words = ["train", str(file), "--examples", str(examples), "--output", str(tmp_path / "model")]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *words], env=os.environ | {"TF_CONFIG": json.dumps(tf_config)},
        capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == WorldFailure.exit_code
    assert f"worker 1 ({addresses[1]})" in done.stderr
