"""Settings of the training that exclude one another, or would do nothing, are refused in words."""

import pytest

from pipelines.config import Config
from trainer.checkpoint import run_key
from trainer.config import GroupConfig, TrainConfig, parse
from trainer.errors import BadInput


def refusal(section, settings, path):
    with pytest.raises(BadInput) as refused:
        parse(section, settings, path=path)
    return str(refused.value)


@pytest.mark.parametrize(
    ("argument", "setting"),
    [
        ("learning_rate", "learning_rate"), ("clipvalue", "clip_value"), ("clipnorm", "clip_norm"),
        ("global_clipnorm", "clip_global_norm"), ("use_ema", "ema_decay"), ("ema_momentum", "ema_decay"),
        ("ema_overwrite_frequency", "ema_decay"), ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("loss_scale_factor", "precision"),
    ],
)  # fmt: skip
def test_an_optimizer_argument_that_is_ours_is_refused_with_the_name_of_our_setting(argument, setting):
    text = refusal(TrainConfig, {"optimizer_args": {argument: 1}}, "train")
    assert text == f"train.optimizer_args.{argument} = 1: belongs to train.{setting}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "central_storage", "precision": "float16"}, "central_storage cannot hold the loss scale"),
        ({"strategy": "central_storage", "sync_batch_norm": True}, "central_storage cannot hold BatchNormalization"),
        ({"num_virtual_devices": 2}, "acts under mirrored and central_storage only"),
        ({"cross_device": "nccl"}, "acts under mirrored only"),
        ({"communication": "ring"}, "acts under multi_worker_mirrored only"),
        ({"bytes_per_pack": 1000}, "acts under multi_worker_mirrored only"),
        ({"eager": True, "jit_compile": True}, "compiles what eager leaves uncompiled"),
        ({"sync_batch_norm": True, "gradient_accumulation_steps": 2}, "the statistics of a part are not those"),
        ({"sync_batch_norm": True, "jit_compile": True}, "choose one"),
        ({"learning_rate_scaling": "linear"}, "each needs the other"),
        ({"base_batch_size": 32}, "each needs the other"),
        ({"profile_steps": [3, 5]}, "needs tensorboard_dir"),
        ({"profile_steps": [5, 3], "tensorboard_dir": "x"}, "must be the first and the last step"),
        ({"strategy": "parameter_server", "ema_decay": 0.9}, "not under parameter_server: asynchronous workers"),
        ({"strategy": "parameter_server", "eager": True}, "not under parameter_server: a coordinator"),
        ({"strategy": "parameter_server", "precision": "float16"}, "not under parameter_server: asynchronous workers"),
        ({"strategy": "parameter_server", "nan_policy": "skip_step"}, "no step is common"),
        (
            {"loop": "keras_fit", "strategy": "multi_worker_mirrored"},
            "Keras cannot read its metrics on several workers",
        ),
        ({"loop": "keras_fit", "strategy": "central_storage"}, "Keras doubles its metrics there"),
        ({"loop": "keras_fit", "clip_norm": 1.0}, "with keras_fit it would not act"),
        ({"loop": "keras_fit", "checkpoint_every_steps": 5}, "with keras_fit it would not act"),
        ({"model": "keras.applications.resnet"}, "keras.applications.<Architecture>"),
    ],
)
def test_what_cannot_be_done_right_is_refused(settings, message):
    assert message in refusal(TrainConfig, settings, "train")


@pytest.mark.parametrize(
    ("train", "cluster", "message"),
    [
        ({"strategy": "mirrored"}, {"num_workers": 2}, "cluster.num_workers is 2; use multi_worker_mirrored"),
        (
            {"strategy": "multi_worker_mirrored"},
            {},
            "cluster.num_workers = 1: train.strategy multi_worker_mirrored needs",
        ),
        ({"strategy": "parameter_server"}, {"num_workers": 2}, "cluster.num_parameter_servers = 0: train.strategy"),
        ({"strategy": "mirrored"}, {"num_parameter_servers": 1}, "would not use 1 parameter server(s)"),
        ({"strategy": "auto", "global_batch_size": 2}, {"num_workers": 3}, "must give each of 3 workers an example"),
        ({"strategy": "auto", "loop": "keras_fit"}, {"num_workers": 2}, "Keras cannot read its metrics"),
    ],
)
def test_a_strategy_must_fit_the_number_of_processes(train, cluster, message):
    assert message in refusal(Config, {"name": "x", "train": train, "cluster": cluster}, "")


def test_what_fits_is_taken():
    parse(Config, {"name": "x", "train": {"strategy": "auto"}, "cluster": {"num_workers": 2}})
    parse(Config, {"name": "x", "train": {"strategy": "parameter_server"}, "cluster": {"num_parameter_servers": 1}})
    group = parse(Config, {"name": "x", "train": {"strategy": "auto"}, "cluster": {"num_workers": 2}}).cluster.group()
    assert type(group) is GroupConfig
    assert group.is_several
    assert not GroupConfig().is_several


def test_where_a_training_runs_does_not_change_its_checkpoints_and_what_decides_its_weights_does():
    key = run_key(TrainConfig(), 7, "sha256:x")
    for same in ({"strategy": "mirrored"}, {"keep_checkpoints": 9}, {"tensorboard_dir": "x"}, {"jit_compile": True}):
        assert run_key(parse(TrainConfig, same), 7, "sha256:x") == key
    for other in ({"epochs": 11}, {"ema_decay": 0.5}, {"precision": "float16"}, {"frozen_layers": ["x"]}):
        assert run_key(parse(TrainConfig, other), 7, "sha256:x") != key
    assert len({key, run_key(TrainConfig(), 8, "sha256:x"), run_key(TrainConfig(), 7, "sha256:y")}) == 3
