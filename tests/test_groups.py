"""A group of real processes trains what one process trains, stops at one step, and outlives its members."""

import contextlib
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
from tensorflow.compat.v1 import GraphDef
from tensorflow.compat.v1.train import summary_iterator

from trainer.config import GroupConfig, TrainConfig, parse
from trainer.errors import BadInput, WorldFailure
from trainer.launch.local import run_group
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


SYNCHRONISED = {
    "model_args": {"batch_norm": "plain"}, "sync_batch_norm": True, "gradient_accumulation_steps": 1,
    "learning_rate": 0.001,
}  # fmt: skip


EAGER = {"eager": True, "epochs": 2}


@pytest.mark.parametrize("more", [{}, SYNCHRONISED, EAGER], ids=["memory", "batch norm", "eager"])
def test_two_workers_give_the_weights_of_one_process(examples, tmp_path, more, capfd):
    alone = parse(TrainConfig, EVERYTHING | more)
    watched = {} if more else {"tensorboard_dir": str(tmp_path / "board"), "profile_steps": [5, 7]}
    packs = {"strategy": "multi_worker_mirrored", "bytes_per_pack": 0 if more else 50}
    together = parse(TrainConfig, EVERYTHING | more | watched | packs)
    fit(alone, 3, examples, tmp_path / "alone", tmp_path / "c1")
    summary = train_as_group(together, 3, examples, tmp_path / "together", tmp_path / "c2", TWO)
    assert (summary["num_replicas"], summary["num_workers"]) == (2, 2)
    assert summary["steps"] == 4 * alone.epochs
    assert difference(weights(tmp_path / "alone"), weights(tmp_path / "together")) < 1e-6
    for one, other in zip(rows(tmp_path / "alone"), rows(tmp_path / "together"), strict=True):
        assert one["num_examples"] == other["num_examples"] == 61
        assert one["validation_loss"] == pytest.approx(other["validation_loss"], abs=1e-5)
    said = capfd.readouterr().out.splitlines()
    assert (
        len([line for line in said if f"epoch {alone.epochs}/{alone.epochs}: loss" in line]) == 2
    )  # once alone, once by the chief: others are quiet
    assert not (tmp_path / "c2").exists()
    if watched:
        events = [event for file in (tmp_path / "board").glob("events*") for event in summary_iterator(str(file))]
        [graph] = [GraphDef.FromString(event.graph_def) for event in events if event.graph_def]
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        # Packs of over 50 bytes in a step, and the sums of a call; all of a step's gradients at once would be 2.
        assert len([node for node in nodes if node.op.startswith("CollectiveReduce")]) > 2
        steps = [event.step for event in events if any(value.tag == "train/loss" for value in event.summary.value)]
        assert {4, 7} <= set(steps)  # a call of steps ends where the profile begins and where it ends
        assert [file.stat().st_size > 0 for file in (tmp_path / "board").glob("plugins/profile/*/*.xplane.pb")] == [
            True
        ]


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


def of_task(process, kind, index):
    """The processes of a group that are one of its tasks."""
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if json.loads(child.environ().get("TF_CONFIG", "{}")).get("task") == {"type": kind, "index": index}:
                yield child


@pytest.mark.parametrize("whom", ["launcher", "worker 1"])
def test_sigterm_stops_all_workers_at_one_step_and_the_next_run_ends_as_if_nothing_had_been(examples, tmp_path, whom):
    streamed = whom == "worker 1"
    epochs = 16 if streamed else 60  # enough to be in the midst of it when the signal comes
    settings = EVERYTHING | {"epochs": epochs, "steps_per_loop": 1, "cache_bytes": 0 if streamed else 2**30}
    config = parse(TrainConfig, settings | {"strategy": "multi_worker_mirrored"})
    with start(config, examples, tmp_path / "model", tmp_path / "checkpoints") as process:
        try:
            assert any(f"epoch 2/{epochs}: loss" in line for line in process.stdout)
            if whom == "launcher":
                process.send_signal(signal.SIGTERM)
            else:
                next(of_task(psutil.Process(process.pid), "worker", 1)).send_signal(signal.SIGTERM)
            rest = process.stdout.read()
            assert process.wait(60) == 143, rest
        finally:
            process.kill()
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))[-1]
    step = json.loads((newest / "state.json").read_text())["state"]["step"]
    assert step >= 8
    assert rest.count(f"after step {step:,}: saved") >= 2  # both workers, at the same step
    assert not (tmp_path / "model").exists()
    summary = train_as_group(config, 3, examples, tmp_path / "resumed", tmp_path / "checkpoints", TWO)
    assert summary["resumed_after_step"] == step
    fit(parse(TrainConfig, settings), 3, examples, tmp_path / "whole", tmp_path / "fresh")
    assert difference(weights(tmp_path / "resumed"), weights(tmp_path / "whole")) < 1e-5  # up to 240 steps


def killing(monkeypatch, after, kind, index):
    """Kills a process of the next group when the chief has said `after`; answers a list that is then not empty."""
    import trainer.launch.training as launching

    killed, run_group = [], launching.run_group

    def watching(*args, emit, **more):
        def watch(source, line):
            if not killed and after in line:
                for child in of_task(psutil.Process(), kind, index):
                    child.kill()
                    killed.append(child.pid)
            emit(source, line)

        return run_group(*args, emit=watch, **more)

    monkeypatch.setattr(launching, "run_group", watching)
    return killed


def test_a_group_that_dies_is_started_again_and_ends_with_the_same_weights(examples, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRIREME_EVENTS", "1")  # as under `trireme run`
    settings = EVERYTHING | {"strategy": "multi_worker_mirrored", "epochs": 12, "steps_per_loop": 1, "cache_bytes": 0}
    killed = killing(monkeypatch, "epoch 3/12: loss", "worker", 1)
    group = TWO.model_copy(update={"max_restarts": 1})
    summary = train_as_group(parse(TrainConfig, settings), 3, examples, tmp_path / "model", tmp_path / "c1", group)
    assert killed
    assert summary["resumed_after_step"] >= 8
    assert '::trireme {"say": "worker 1 was ended by SIGKILL' in capsys.readouterr().out
    fit(parse(TrainConfig, settings | {"strategy": "default"}), 3, examples, tmp_path / "alone", tmp_path / "c2")
    assert difference(weights(tmp_path / "alone"), weights(tmp_path / "model")) < 1e-5  # 48 steps


def test_a_fault_of_one_worker_is_reported_under_its_name_and_with_its_words(examples, tmp_path):
    config = parse(TrainConfig, EVERYTHING | {"strategy": "multi_worker_mirrored", "optimizer_args": {"beta": 1}})
    with pytest.raises(BadInput, match=r"worker \d ended with exit code 2: train.optimizer_args"):
        train_as_group(config, 3, examples, tmp_path / "model", tmp_path / "c", TWO)


# Worker 0's clock is the world's; worker 1's runs 200 times as fast, so that it would take far fewer steps a call.
WITH_CLOCKS = """
import json, os, signal, sys, time
from pathlib import Path
from trainer.config import TrainConfig, parse_json
from trainer.loop import fit
signal.alarm(600)  # workers that wait for one another would wait for ever
speed = 200 if json.loads(os.environ["TF_CONFIG"])["task"]["index"] else 1
examples, folder, checkpoints = map(Path, sys.argv[2:])
fit(parse_json(TrainConfig, sys.argv[1]), 3, examples, folder, checkpoints, clock=lambda: speed * time.monotonic())
"""


def test_workers_whose_clocks_differ_make_the_same_steps_of_a_streamed_split(examples, tmp_path):
    settings = EVERYTHING | {"epochs": 12, "cache_bytes": 0, "checkpoint_every_secs": 0.001}
    together = parse(TrainConfig, settings | {"strategy": "multi_worker_mirrored"})
    paths = map(str, (examples, tmp_path / "together", tmp_path / "c1"))
    result = run_group(
        [sys.executable, "-c", WITH_CLOCKS, together.to_json(), *paths],
        2, max_restarts=0, grace_period_secs=5, log_folder=tmp_path / "logs", emit=lambda *_: None,
    )  # fmt: skip
    assert result.exit_code == 0, result.first_failure
    fit(parse(TrainConfig, settings), 3, examples, tmp_path / "alone", tmp_path / "c2")
    assert difference(weights(tmp_path / "alone"), weights(tmp_path / "together")) < 1e-6  # 48 steps
    assert [row["num_examples"] for row in rows(tmp_path / "together")] == [61] * 12


def test_a_strategy_for_one_process_is_refused_before_anybody_is_waited_for(examples, tmp_path):
    began = time.monotonic()
    config = parse(TrainConfig, EVERYTHING | {"strategy": "mirrored"})
    with pytest.raises(BadInput, match="trains in one process, and the cluster has 2 workers"):
        train_as_group(config, 3, examples, tmp_path / "model", tmp_path / "c", TWO)
    assert time.monotonic() - began < 60


SERVERS = GroupConfig(num_workers=2, num_parameter_servers=1, max_restarts=2, start_timeout_secs=120)


@pytest.mark.parametrize("lost", ["nobody", "worker", "ps"])
def test_parameter_servers_reach_the_accuracy_of_the_synchronous_run(examples, tmp_path, lost, monkeypatch):
    settings = {
        "model": "mlp", "model_args": {"hidden_units": [16]}, "epochs": 40, "global_batch_size": 16,
        "learning_rate": 0.01, "keep_best": None, "checkpoint_every_steps": 16,
    }  # fmt: skip
    config = parse(TrainConfig, settings | {"strategy": "parameter_server"})
    killed = killing(monkeypatch, "epoch 10/40: loss" if lost != "nobody" else "never said", lost, 0)
    summary = train_as_group(config, 3, examples, tmp_path / "model", tmp_path / "c", SERVERS)
    assert bool(killed) == (lost != "nobody")
    fit(parse(TrainConfig, settings), 3, examples, tmp_path / "alone", tmp_path / "c2")
    synchronous, asynchronous = rows(tmp_path / "alone")[-1], rows(tmp_path / "model")[-1]
    assert asynchronous["num_examples"] == 61  # each step's examples are counted once, a lost worker's too
    assert summary["steps"] == 40 * 4
    assert (summary["resumed_after_step"] is not None) == (lost == "ps")
    assert asynchronous["validation_accuracy"] > synchronous["validation_accuracy"] - 0.15


def test_parameter_servers_refuse_a_split_that_does_not_fit(examples, tmp_path):
    settings = {"model": "mlp", "epochs": 1, "global_batch_size": 16, "strategy": "parameter_server", "cache_bytes": 0}
    config = parse(TrainConfig, settings)
    with pytest.raises(BadInput, match="holds the train split in memory; it has"):
        train_as_group(config, 3, examples, tmp_path / "model", tmp_path / "c", SERVERS)


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
