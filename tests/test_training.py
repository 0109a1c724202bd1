"""fit, from a prepared dataset to an exported model: it goes on where it died, says what is wrong, and loses nothing."""

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_data import write_dataset

from trainer.cluster import ClusterDescription
from trainer.config import TrainConfig, parse
from trainer.data.manifest import read_manifest
from trainer.data.reading import open_feed
from trainer.errors import BadInput, Preempted, WorldFailure
from trainer.loop import fit
from trainer.optimizer import build_optimizer
from trainer.step import Trainer
from trainer.strategy import build_strategy

pytestmark = pytest.mark.usefixtures("three_cpus")

TINY = {"model": "small_models:plain", "epochs": 3, "global_batch_size": 16, "learning_rate": 0.01, "steps_per_loop": 1}
TWO = {"strategy": "mirrored", "num_virtual_devices": 2}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training") / "examples"
    write_dataset(folder, train=61, validation=23)
    return folder


@pytest.fixture
def train(examples, tmp_path):
    """Trains and gives the summary; everything of it stands in `tmp_path/<name>` and its checkpoints beside."""

    def run(name="model", *, seed=3, checkpoints="checkpoints", folder=examples, **settings):
        config = parse(TrainConfig, TINY | settings)
        return fit(config, seed, folder, tmp_path / name, tmp_path / checkpoints)

    return run


@pytest.fixture
def weights(tmp_path):
    return lambda name="model": keras.models.load_model(tmp_path / name / "model.keras", compile=False).get_weights()


@pytest.fixture
def rows(tmp_path):
    return lambda name="model": [
        json.loads(row) for row in (tmp_path / name / "history.jsonl").read_text().splitlines()
    ]


class Died(BaseException):
    """Stands for SIGKILL where a process of its own would cost too much: nothing of ours catches it."""


@pytest.fixture
def at_step(monkeypatch):
    """Does something once, after so many steps were trained in this process."""

    @contextlib.contextmanager
    def arrange(step, action):
        done, train_steps = [0], Trainer.train_steps

        def watched(self, feed, iterator, epoch, first_step, num_steps, *rest):
            report = train_steps(self, feed, iterator, epoch, first_step, num_steps, *rest)
            before, done[0] = done[0], done[0] + num_steps
            if before < step <= done[0]:
                action()
            return report

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_steps", watched)
            yield

    return arrange


def die():
    raise Died


def exactly(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def difference(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


RESUMED = {
    "dropout": {"model_args": {"dropout": 0.3}, "keep_best": None},
    "averages, accumulation, best": {
        "model_args": {"dropout": 0.3},
        "ema_decay": 0.9,
        "gradient_accumulation_steps": 2,
    },
    "float16": {"model_args": {"dropout": 0.3}, "precision": "float16", "keep_best": None},
    "streamed": {"model_args": {"dropout": 0.3}, "cache_bytes": 0, "shuffle_buffer_bytes": 2000, "keep_best": None},
    "batch norm": {"model_args": {"batch_norm": "plain"}, "keep_best": None},
    "two replicas": {"model_args": {"dropout": 0.3}, "keep_best": None, **TWO},
}


@pytest.mark.parametrize("settings", RESUMED.values(), ids=RESUMED)
def test_a_run_that_died_ends_with_the_weights_of_one_that_did_not(train, weights, rows, at_step, settings):
    train("whole", checkpoints="c1", **settings)
    with at_step(6, die), pytest.raises(Died):
        train("model", checkpoint_every_steps=3, **settings)
    with at_step(2, die), pytest.raises(Died):  # 3 to 5 again, and no further
        train("model", checkpoint_every_steps=3, **settings)
    summary = train("model", checkpoint_every_steps=3, **settings)
    assert summary["resumed_after_step"] == 4  # the end of the first epoch
    assert exactly(weights("whole"), weights("model"))
    for one, other in zip(rows("whole"), rows("model"), strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}


def test_a_run_on_two_replicas_goes_on_with_one(train, weights, at_step):
    settings = {"ema_decay": 0.9, "keep_best": None}
    train("whole", checkpoints="c1", **settings, **TWO)
    with at_step(7, die), pytest.raises(Died):
        train("model", checkpoint_every_steps=5, **settings, **TWO)
    assert train("model", checkpoint_every_steps=5, **settings)["resumed_after_step"] == 5
    assert difference(weights("whole"), weights("model")) < 1e-6


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_weights(train, weights, examples, tmp_path):
    settings = {"model_args": {"dropout": 0.3}, "epochs": 6, "checkpoint_every_steps": 1, "ema_decay": 0.9}
    train("whole", checkpoints="c1", **settings)
    config = parse(TrainConfig, TINY | settings)
    program = (
        "import os, signal, sys, threading, time\n"
        "from pathlib import Path\n"
        "from trainer.config import *\n"
        "from trainer.loop import fit\n"
        "from trainer import progress\n"
        "train, examples, folder, checkpoints, delay = sys.argv[1:]\n"
        "def kill():\n"
        "    while not any(Path(checkpoints).glob('step-*')): time.sleep(0.001)\n"
        "    time.sleep(float(delay)); os.kill(os.getpid(), signal.SIGKILL)\n"
        "if float(delay) >= 0: threading.Thread(target=kill, daemon=True).start()\n"
        "fit(parse_json(TrainConfig, train), 3, *map(Path, (examples, folder, checkpoints)))\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])}
    kills, reached = 0, []
    for delay in [*(random.Random(5).uniform(0.0, 0.4) for _ in range(6)), -1.0]:
        words = [config.to_json(), examples, tmp_path / "model", tmp_path / "checkpoints", delay]
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, words)], env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
        kills += 1
        reached.append(max(path.name for path in (tmp_path / "checkpoints").glob("step-*")))
    assert done.returncode == 0
    assert kills >= 1
    assert reached == sorted(reached)
    assert exactly(weights("whole"), weights("model"))


@pytest.mark.parametrize("strategy", [{}, TWO], ids=["default", "mirrored"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leads_to_a_checkpoint_of_that_very_step(train, weights, at_step, number, strategy):
    settings = {"model_args": {"dropout": 0.3}, **strategy}
    train("whole", checkpoints="c1", **settings)
    with (
        at_step(6, lambda: os.kill(os.getpid(), number)),
        pytest.raises(Preempted, match="after step 6: saved") as left,
    ):
        train("model", **settings)
    assert left.value.exit_code == 143
    with at_step(2, lambda: os.kill(os.getpid(), number)), pytest.raises(Preempted, match="after step 8: saved"):
        train("model", **settings)  # at the end of an epoch
    assert train("model", **settings)["resumed_after_step"] == 8
    assert exactly(weights("whole"), weights("model"))


def test_a_signal_before_the_first_step_ends_the_run_at_once(train, monkeypatch):
    import trainer.loop

    monkeypatch.setattr(trainer.loop, "check_model", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted, match="SIGTERM before the first step"):
        train()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_while_the_model_is_written_lets_it_be_finished(train, weights, monkeypatch):
    import trainer.finish

    train("whole", checkpoints="c1")
    export = trainer.finish.export_model

    def asked_meanwhile(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return export(*arguments)

    monkeypatch.setattr(trainer.finish, "export_model", asked_meanwhile)
    assert train("model")["steps"] == 12
    assert exactly(weights("whole"), weights("model"))


def test_a_second_signal_while_the_model_is_written_leaves_none_and_the_next_run_writes_it(train, examples, tmp_path):
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from trainer.config import *\n"
        "import trainer.finish\n"
        "from trainer.loop import fit\n"
        "export = trainer.finish.export_model\n"
        "def asked_twice(*arguments):\n"
        "    export(*arguments)\n"
        "    for _ in range(2): os.kill(os.getpid(), signal.SIGTERM)\n"
        "trainer.finish.export_model = asked_twice\n"
        "fit(parse_json(TrainConfig, sys.argv[1]), 3, *map(Path, sys.argv[2:]))\n"
    )
    words = [parse(TrainConfig, TINY).to_json(), *map(str, (examples, tmp_path / "model", tmp_path / "checkpoints"))]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])}
    done = subprocess.run([sys.executable, "-c", program, *words], env=environ, capture_output=True, check=False)
    assert done.returncode == 143, done.stderr[-2000:]
    assert not (tmp_path / "model").exists()
    assert train()["resumed_after_step"] == 12
    assert (tmp_path / "model" / "train.json").exists()


def test_checkpoints_come_by_steps_and_by_seconds_and_only_the_newest_and_the_best_stay(
    train, examples, tmp_path, monkeypatch
):
    from trainer.checkpoint import Checkpoints

    saved = []
    original = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, state: (saved.append(state.step), original(self, state)))
    train(checkpoint_every_steps=3, checkpoints="c1")
    assert saved == [3, 4, 6, 8, 9, 12]
    saved.clear()
    seconds = iter(range(10_000))
    config = parse(TrainConfig, TINY | {"checkpoint_every_secs": 10.0})
    fit(config, 3, examples, tmp_path / "timed", tmp_path / "c2", clock=lambda: next(seconds))
    assert len(saved) > 3
    assert saved != [4, 8, 12]


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(train, weights, at_step, tmp_path, capsys):
    train("whole", checkpoints="c1")
    with at_step(9, die), pytest.raises(Died):
        train(checkpoint_every_steps=3)
    newest = tmp_path / "checkpoints" / "step-00000008"
    data = newest / "variables.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-7])
    assert train(checkpoint_every_steps=3)["resumed_after_step"] == 6
    assert "the checkpoint of step 8 is damaged (variables.data-00000-of-00001)" in capsys.readouterr().out
    assert exactly(weights("whole"), weights())


def test_a_checkpoint_of_another_training_is_refused_by_the_setting(train, at_step):
    with at_step(5, die), pytest.raises(Died):
        train()
    with pytest.raises(BadInput, match=r"train.learning_rate = 0.02: the checkpoints in .* were made with 0.01"):
        train(learning_rate=0.02)
    with pytest.raises(BadInput, match=r"seed = 4: .* were made with 3"):
        train(seed=4)
    with at_step(2, die), pytest.raises(Died):
        train(steps_per_loop=2, keep_checkpoints=1, **TWO)  # what does not decide the weights may change


def test_a_full_disk_leaves_the_earlier_checkpoints_and_the_run_goes_on_from_them(
    train, weights, tmp_path, monkeypatch
):
    train("whole", checkpoints="c1")
    import trainer.checkpoint

    write, count = trainer.checkpoint.write_tensors, [0]

    def full(prefix, values):
        count[0] += 1
        if count[0] == 2:
            Path(f"{prefix}.index").write_bytes(b"half")
            raise tf.errors.ResourceExhaustedError(None, None, f"{prefix}: No space left on device")
        write(prefix, values)

    monkeypatch.setattr(trainer.checkpoint, "write_tensors", full)
    with pytest.raises(WorldFailure, match=r"checkpoint of step 8 could not be written .*No space left"):
        train()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]
    assert train()["resumed_after_step"] == 4
    assert exactly(weights("whole"), weights())


def test_checkpoints_in_a_bucket_outlive_the_machine(train, weights, at_step, examples, tmp_path, gcs):
    from trainer import storage

    mirror = f"{gcs}/checkpoints"
    settings = {"model_args": {"dropout": 0.3}, "checkpoint_every_steps": 3}
    train("whole", checkpoints="c1", **settings)
    config = parse(TrainConfig, TINY | settings)
    with at_step(10, die), pytest.raises(Died):
        fit(config, 3, examples, tmp_path / "model", tmp_path / "one machine", mirror=mirror)
    assert storage.list_folders(mirror) == ["step-00000006", "step-00000008", "step-00000009"]
    summary = fit(config, 3, examples, tmp_path / "model", tmp_path / "another", mirror=mirror)
    assert summary["resumed_after_step"] == 9
    assert exactly(weights("whole"), weights())
    assert storage.list_folders(mirror) == []


def test_a_finished_run_leaves_no_checkpoints_and_says_where_the_time_went(train, rows, tmp_path, capsys):
    summary = train()
    assert not (tmp_path / "checkpoints").exists()
    assert (summary["steps"], summary["epochs"], summary["num_replicas"], summary["skipped_steps"]) == (12, 3, 1, 0)
    assert json.loads((tmp_path / "model" / "train.json").read_text())["steps"] == 12
    assert [row["num_examples"] for row in rows()] == [61, 61, 61]
    parts = summary["seconds_by_kind"]
    assert 0 < parts["stepping"] + parts["validating"] + parts["saving"] <= summary["seconds"]
    said = capsys.readouterr().out
    assert "1 replica(s) on 1 worker(s):" in said
    assert "a replica; time: stepping" in said


# What goes wrong.


class Recorder:
    """Keeps the reports of all steps."""

    def __init__(self, monkeypatch):
        self.reports, train_steps = [], Trainer.train_steps

        def watched(trainer, *args):
            report = train_steps(trainer, *args)
            self.reports.append((report, trainer.loss_scale and trainer.loss_scale.variables.numpy().tolist()))
            return report

        monkeypatch.setattr(Trainer, "train_steps", watched)


@pytest.mark.parametrize("strategy", [{}, TWO], ids=["one device", "two replicas"])
@pytest.mark.parametrize(
    "place", [0, 26, 31, 60]
)  # of 61 examples in batches of 16: each replica's share, and the last
def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(train, examples, tmp_path, strategy, place):
    feed = open_feed(examples, read_manifest(examples), "train", seed=3, config=parse(TrainConfig, {}), shuffle=True)
    order = feed.take(tf.constant(0, tf.int64), 0, 61)[0]["image"].numpy()[:, 0, 0, 0].tolist()
    bad = {"model_args": {"pixel": order[place], "forward": float("inf")}, "steps_per_loop": 4}
    settings = PLANTED | strategy | bad
    step = place // 16 + 1
    with pytest.raises(
        WorldFailure, match=rf"not a finite number at step {step} .*learning rate 0.01.*train.learning_rate"
    ):
        train(**settings)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("settings", "said", "unsaid"),
    [
        ({}, ["lower train.learning_rate", "set train.clip_global_norm", "statistics.json", "train.nan_policy skip_step"],
         ["precision"]),
        ({"clip_norm": 0.5}, ["lower train.clip_norm (0.5)"], ["clip_global_norm"]),
        ({"precision": "float16"}, ["set train.precision to float32 (it is float16)"], []),
        ({"nan_policy": "skip_step"}, ["statistics.json"], ["nan_policy"]),
        ({"loop": "keras_fit"}, ["lower train.learning_rate", "statistics.json"], ["clip", "nan_policy"]),
    ],
)  # fmt: skip
def test_the_advice_against_a_loss_that_is_not_finite_names_settings_that_are_left_to_try(settings, said, unsaid):
    from trainer.epochs import advice_against_nan

    advice = advice_against_nan(parse(TrainConfig, settings))
    assert all(part in advice for part in said)
    assert not any(part in advice for part in unsaid)


PLANTED = {"model": "small_models:planted", "keep_best": None}
THREE = {"strategy": "mirrored", "num_virtual_devices": 3}


@pytest.mark.parametrize("plant", ["forward", "backward"])
@pytest.mark.parametrize("strategy", [{}, TWO, THREE], ids=["one", "two", "three"])
def test_steps_that_are_not_finite_are_left_out_and_counted(train, weights, monkeypatch, strategy, plant, capsys):
    found = Recorder(monkeypatch)
    args = {"pixel": 60, plant: float("inf")}  # one example of 61, on one replica
    summary = train(**PLANTED, model_args=args, nan_policy="skip_step", ema_decay=0.9, **strategy)
    assert summary["skipped_steps"] == 3  # once an epoch
    assert [report.skipped for report, _ in found.reports].count(1) == 3
    assert all(np.isfinite(value).all() for value in weights())
    assert "1 step(s) up to step" in capsys.readouterr().out


def test_too_many_left_out_steps_in_a_row_stop_the_run(train):
    settings = {**PLANTED, "model_args": {"pixel": 60, "forward": float("inf")}, "nan_policy": "skip_step"}
    with pytest.raises(WorldFailure, match=r"3 steps in a row .*train.max_skipped_steps = 2"):
        train(**settings, max_skipped_steps=2, global_batch_size=61, epochs=5)


@pytest.mark.parametrize("pixel", [0, 30, 60])
def test_an_overflow_on_any_replica_lowers_the_loss_scale_and_spares_the_weights(train, weights, monkeypatch, pixel):
    settings = {**PLANTED, "precision": "float16", "optimizer": "sgd", "global_batch_size": 61, "epochs": 8}
    # The gradient of this example's logits overflows float16's 65504 until the loss scale is small enough.
    settings["model_args"] = {"pixel": pixel, "backward": 4096.0}
    found = Recorder(monkeypatch)
    summary = train("two", checkpoints="c1", **settings, **TWO)
    scales = [scale[0] for _, scale in found.reports]
    assert 2 <= summary["skipped_steps"] < 8
    assert scales[:2] == [2.0**14, 2.0**13]
    assert len(set(scales)) == summary["skipped_steps"]
    found.reports.clear()
    train("one", checkpoints="c2", **settings)
    assert [scale[0] for _, scale in found.reports] == scales
    assert all(np.isfinite(value).all() for value in weights("two"))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_computes_in_it_and_keeps_float32_weights(train, weights, precision):
    train("half", checkpoints="c1", precision=precision, keep_best=None)
    train("full", checkpoints="c2", keep_best=None)
    assert all(value.dtype == np.float32 for value in weights("half"))
    assert 1e-6 < difference(weights("half"), weights("full")) < 0.1
    assert keras.config.dtype_policy().name == "float32"


# Models.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "small_models:wrong_answer"}, r"three heads expected, two found"),
        ({"model": "small_models:untrainable"}, r"none of its 2 trainable weights has a part in the answer"),
        ({"model_args": {"batch_norm": "plain"}, "global_batch_size": 30, **TWO}, r"last step of an epoch has 1 examples"),
        ({"model_args": {"batch_norm": "plain"}, "strategy": "central_storage"}, r"central_storage: cannot hold .*\(norm\)"),
        ({"model_args": {"dropout": 0.1}, "strategy": "central_storage"}, r"central_storage: cannot hold .*\(drop\)"),
        ({"sync_batch_norm": True}, r"sync_batch_norm = true: the model has no BatchNormalization layer"),
        ({"model_args": {"batch_norm": "synchronized"}, "jit_compile": True}, r"train.jit_compile: does not go with"),
        ({"frozen_layers": ["hiden"]}, r'"hiden": matches no layer with weights \(there are hidden, head\)'),
        ({"frozen_layers": ["h*"]}, r"leaves nothing to train"),
        ({"optimizer": "adamm"}, r'optimizer = "adamm": must be one of .*adam'),
        ({"optimizer_args": {"beta": 1}}, r"optimizer_args = .*beta"),
        ({"optimizer_args": {"beta_1": "much"}}, r'optimizer_args.beta_1 = "much": must be a float, such as adam.s own 0.9'),
        ({"optimizer_args": {"amsgrad": 1}}, r"optimizer_args.amsgrad = 1: must be a bool, such as adam.s own false"),
        ({"model": "small_models:breaks"}, r"cannot be built .*: KeyError: 'no_such' \(.*small_models.py, line \d+\)"),
        ({"model": "small_models:two_answers"}, r"must answer one tensor for image .*, and answers a list of 2"),
        ({"global_batch_size": 62}, r"global_batch_size = 62: the train split has 61 examples"),
        ({"model": "keras.applications.MobilNetV2"}, r"did you mean keras.applications.MobileNetV2"),
        ({"strategy": "tpu"}, r"strategy = tpu: TensorFlow sees 0 TPU devices"),
        ({"strategy": "multi_worker_mirrored"}, r"needs at least 2 workers, and there is 1"),
        ({"strategy": "parameter_server"}, r"the cluster has 0"),
        ({"strategy": "mirrored", "num_virtual_devices": 9}, r"= 9: this process has already started TensorFlow with 3"),
        ({"cross_device": "nccl", "strategy": "mirrored"}, r"cross_device = nccl: adds between GPUs, and TensorFlow sees 0"),
        ({"warm_start": {"source": "nowhere"}}, r'warm_start.source = "nowhere": is no .keras file'),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_any_step(train, settings, message, monkeypatch):
    monkeypatch.setattr(Trainer, "train_steps", lambda *_: pytest.fail("a step was trained"))
    with pytest.raises(BadInput, match=message):
        train(**settings)


def test_workers_without_gpus_are_refused_nccl_before_they_connect():
    config = TrainConfig(strategy="multi_worker_mirrored", communication="nccl")
    two = ClusterDescription(
        workers=("no-such-host.invalid:1", "no-such-host.invalid:2"), task_type="worker", task_index=0
    )
    with pytest.raises(BadInput, match=r"^train.communication = nccl: adds between GPUs, and TensorFlow sees 0$"):
        build_strategy(config, two, {})


def test_a_module_that_fails_when_it_is_imported_is_refused_with_the_line(train, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("x = 1\nx / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        BadInput, match=r"cannot be imported: ZeroDivisionError: division by zero \(.*module.py, line 2\)"
    ):
        train(model="broken_module:build")


@pytest.mark.parametrize("at", ["checkpoints", "tensorboard_dir"])
def test_a_folder_that_cannot_be_written_is_found_before_any_step(train, tmp_path, at, monkeypatch):
    monkeypatch.setattr(Trainer, "train_steps", lambda *_: pytest.fail("a step was trained"))
    (tmp_path / "file").write_text("")
    with pytest.raises(
        WorldFailure, match=r"file/in: no checkpoint can|tensorboard_dir = .*file/in: cannot be written: "
    ):
        train(**{at: str(tmp_path / "file/in")})
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "checkpoints").exists()


def test_two_trainings_cannot_save_into_one_folder(train, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    held = os.open(tmp_path / "checkpoints", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(WorldFailure, match="another training is saving its checkpoints there"):
            train()
    finally:
        os.close(held)
    assert train()["steps"] > 0


def test_more_accelerators_asked_for_than_visible_are_refused(train, monkeypatch):
    monkeypatch.setenv("TRIREME_NUM_ACCELERATORS", "2")
    with pytest.raises(BadInput, match=r"cluster.accelerator.count = 2: TensorFlow sees 0 GPU"):
        train(strategy="mirrored")


def test_trying_the_model_changes_nothing(examples, monkeypatch):
    from trainer.consensus import Consensus
    from trainer.first_batch import check_model
    from trainer.run import prepare_run

    config = parse(TrainConfig, TINY | {"model_args": {"dropout": 0.5, "batch_norm": "plain"}})
    strategy = tf.distribute.get_strategy()
    run = prepare_run(config, 3, examples, read_manifest(examples), strategy, Consensus(strategy, None), float)
    before = [variable.numpy() for variable in run.trainer.model.variables]
    check_model(run.trainer, run.train_feed, config, strategy_name="default")
    assert exactly(before, [variable.numpy() for variable in run.trainer.model.variables])


def test_frozen_layers_keep_their_weights(train, weights):
    train("begun", checkpoints="c1", epochs=1, learning_rate=1e-9, keep_best=None)
    train("frozen", checkpoints="c2", frozen_layers=["hid*"], keep_best=None)
    begun, frozen = weights("begun"), weights("frozen")
    assert difference(begun[:2], frozen[:2]) < 1e-7
    assert difference(begun[2:], frozen[2:]) > 1e-3


@pytest.mark.parametrize("source", ["model", "model/model.keras", "checkpoint"])
def test_a_warm_start_takes_the_weights_and_trains_on(train, weights, at_step, tmp_path, source, capsys):
    if source == "checkpoint":
        with at_step(9, die), pytest.raises(Died):
            train("model", ema_decay=0.5)
        source = "checkpoints/step-00000008"
        want = None
    else:
        train("model", checkpoints="c1")
        want = weights("model")
    settings = {"warm_start": {"source": str(tmp_path / source)}, "epochs": 1, "learning_rate": 1e-9, "keep_best": None}
    train("warm", checkpoints="c2", ema_decay=0.9, **settings)
    assert "warm start: 4 of 4 weights" in capsys.readouterr().out
    if want is not None:
        assert difference(want, weights("warm")) < 1e-6


def test_a_warm_start_also_begins_the_weights_that_an_optimizer_keeps(train, weights, tmp_path):
    train("model", checkpoints="c1")
    settings = {
        "warm_start": {"source": str(tmp_path / "model")},
        "epochs": 1,
        "learning_rate": 1e-9,
        "keep_best": None,
    }
    train("warm", checkpoints="c2", optimizer="schedulefreeadamw", **settings)
    assert difference(weights(), weights("warm")) < 1e-6


def test_every_optimizer_that_is_offered_takes_a_step():
    with pytest.raises(BadInput, match=r"must be one of adadelta, .*, lamb, .*, sgd") as refused:
        build_optimizer(parse(TrainConfig, TINY | {"optimizer": "optimizermap"}), 1)
    offered = str(refused.value).partition("must be one of ")[2].split(", ")
    assert len(offered) > 12
    for name in offered:
        variable = keras.Variable(np.ones((3, 2), np.float32))
        build_optimizer(parse(TrainConfig, TINY | {"optimizer": name}), 1).apply([tf.ones((3, 2))], [variable])
        assert np.isfinite(variable.numpy()).all(), name
        assert (variable.numpy() < 1).all(), name


def test_a_warm_start_of_other_shapes_is_refused_unless_the_layer_is_excepted(train, weights, tmp_path):
    train("model", checkpoints="c1", model_args={"units": 5})
    settings = {"epochs": 1, "learning_rate": 1e-9, "keep_best": None}
    with pytest.raises(
        BadInput, match=r"hidden/kernel has the shape \[16, 8\], the source's \[16, 5\]; name its layer"
    ):
        train("warm", checkpoints="c2", warm_start={"source": str(tmp_path / "model")}, **settings)
    excepted = {"source": str(tmp_path / "model"), "except_layers": ["hidden", "head"]}
    train("warm", checkpoints="c2", warm_start=excepted, **settings)
    with pytest.raises(BadInput, match=r'except_layers = "tail": matches no layer'):
        train("other", checkpoints="c3", warm_start=excepted | {"except_layers": ["tail"]}, **settings)


def test_any_architecture_of_keras_can_be_named(tmp_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures") / "examples"
    write_dataset(folder, train=8, side=8)
    config = parse(TrainConfig, {
        "model": "keras.applications.MobileNetV2", "epochs": 1, "global_batch_size": 8,
        "model_args": {"input_size": [32, 32], "architecture_args": {"alpha": 0.35}}, "keep_best": None,
    })  # fmt: skip
    assert fit(config, 3, folder, tmp_path / "model", tmp_path / "c")["steps"] == 1


# What a person decides about numbers and sees of them.


def test_the_learning_rate_is_scaled_only_when_asked_and_then_said(train, rows, capsys):
    train("plain", checkpoints="c1")
    train("linear", checkpoints="c2", learning_rate_scaling="linear", base_batch_size=8)
    train("root", checkpoints="c3", learning_rate_scaling="sqrt", base_batch_size=64)
    rates = [rows(name)[0]["learning_rate"] for name in ("plain", "linear", "root")]
    assert rates == pytest.approx([0.01, 0.02, 0.005])
    said = capsys.readouterr().out
    assert "learning rate 0.01 for a batch of 8 becomes 0.02 for 16 (linear scaling)" in said
    assert said.count("scaling") == 2


def test_early_stopping_ends_the_training_and_the_best_epoch_is_exported(train, rows):
    summary = train(epochs=30, learning_rate=0.3, early_stopping={"patience_epochs": 2})
    losses = [row["validation_loss"] for row in rows()]
    assert summary["epochs"] == len(losses) < 30
    assert summary["best_epoch"] == 1 + int(np.argmin(losses)) == len(losses) - 2


def test_tensorboard_can_read_the_scalars_the_graph_and_the_profile(train, tmp_path):
    train(tensorboard_dir=str(tmp_path / "board"), profile_steps=[5, 6], steps_per_loop=4)
    (file,) = (tmp_path / "board").glob("events.*")
    tags, graphs = {}, 0
    for record in tf.data.TFRecordDataset(str(file)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        graphs += bool(event.graph_def)
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name in ("scalars", "graph_run_metadata", "graphs")
            tags.setdefault(value.tag, []).append(event.step)
    assert tags["train/loss"] == [4, 6, 8, 12]
    assert tags["epoch/validation_loss"] == [4, 8, 12]
    assert {"train/learning_rate", "train/examples_per_second", "epoch/accuracy"} <= tags.keys()
    assert graphs == 1
    assert list((tmp_path / "board" / "plugins" / "profile").glob("*/*.xplane.pb"))


@pytest.mark.slow
def test_deterministic_operations_are_asked_for(examples, tmp_path):
    config = parse(TrainConfig, {"model": "mlp", "epochs": 1, "global_batch_size": 16, "deterministic": True})
    program = (
        "import sys; from pathlib import Path; from trainer.config import *; from trainer.loop import fit\n"
        "fit(parse_json(TrainConfig, sys.argv[1]), 3, *map(Path, sys.argv[2:]))\n"
        "from tensorflow.python.framework import config; print('deterministic', config.is_op_determinism_enabled())\n"
    )
    words = [config.to_json(), str(examples), str(tmp_path / "m"), str(tmp_path / "c")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parents[1])  # fmt: skip
    assert "deterministic True" in done.stdout


# Keras' own loop.


def test_keras_fit_gives_the_weights_of_the_own_loop_where_keras_is_right(train, weights):
    train("own", checkpoints="c1", keep_best=None, model_args={"l2": 0.01})
    train("keras", checkpoints="c2", keep_best=None, model_args={"l2": 0.01}, loop="keras_fit", steps_per_loop=None)
    assert difference(weights("own"), weights("keras")) < 1e-6


def test_a_model_with_a_train_step_of_its_own_takes_it(train, weights, rows, capsys):
    own = {"model": "small_models:own_step", "loop": "keras_fit", "steps_per_loop": None, "keep_best": None}
    train("keras", checkpoints="c1", **own, global_batch_size=61)
    assert "the model compiles itself" in capsys.readouterr().out
    train("own", checkpoints="c2", keep_best=None, optimizer="sgd", learning_rate=0.1, global_batch_size=61)
    assert difference(weights("own"), weights("keras")) < 1e-6
    for mine, theirs in zip(rows("own"), rows("keras"), strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-6)
        assert theirs["accuracy"] is None  # its step does not look at it
        assert theirs["validation_accuracy"] == mine["validation_accuracy"]
    with pytest.raises(BadInput, match=r"train\.jit_compile: the model compiles itself"):
        train("no", checkpoints="c3", **own, jit_compile=True)


@pytest.mark.parametrize("replicas", [{}, TWO])
def test_a_train_step_of_its_own_is_enough_without_a_compile(train, weights, rows, replicas):
    own = {"model": "small_models:own_step", "model_args": {"learning_rate": None}, "epochs": 2, "keep_best": None}
    train("keras", **own, loop="keras_fit", steps_per_loop=None, optimizer="sgd", **replicas)
    assert all(row["accuracy"] is None and row["loss"] > 0 for row in rows("keras"))


def test_keras_fit_on_replicas_leaves_out_what_does_not_divide_and_says_so(train, rows, capsys):
    summary = train(loop="keras_fit", steps_per_loop=None, **TWO)
    assert summary["num_replicas"] == 2
    assert "keras_fit: 1 example(s) of each epoch are left out" in capsys.readouterr().out
    assert rows()[-1]["validation_loss"] < rows()[0]["validation_loss"]


def test_keras_fit_resumes_after_the_last_finished_epoch(train, weights, monkeypatch):
    settings = {"loop": "keras_fit", "steps_per_loop": None, "keep_best": None, "model_args": {"dropout": 0.2}}
    train("whole", checkpoints="c1", **settings)
    import trainer.keras_fit as module

    finish_epoch = module.finish_epoch

    def stop_in_the_next(run):
        finish_epoch(run)
        if run.state.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "finish_epoch", stop_in_the_next)
    with pytest.raises(Preempted, match="SIGTERM in epoch 2: keras_fit keeps no place inside an epoch"):
        train("model", **settings)
    assert train("model", **settings)["resumed_after_step"] == 4
    assert exactly(weights("whole"), weights())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "float16", **TWO}, "train.precision: not with keras_fit over 2 replicas"),
        ({"jit_compile": True, **TWO}, "train.jit_compile: not with keras_fit over 2 replicas"),
        ({"cache_bytes": 0}, "gathers each batch from memory"),
    ],
)
def test_keras_fit_refuses_what_keras_does_wrong(train, settings, message):
    with pytest.raises(BadInput, match=message):
        train(loop="keras_fit", steps_per_loop=None, **settings)


def test_the_folder_of_a_training_is_not_overwritten(train, tmp_path):
    train()
    with pytest.raises(BadInput, match="is not empty"):
        train()
    shutil.rmtree(tmp_path / "model")
