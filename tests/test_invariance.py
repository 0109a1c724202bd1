"""The same weights on any number of replicas, and every example exactly once."""

import math

import numpy as np
import pytest
import tensorflow as tf
from small_data import write_dataset

from trainer.config import TrainConfig, parse
from trainer.data.manifest import read_manifest
from trainer.data.reading import open_feed
from trainer.models import build_model
from trainer.objective import objective_of
from trainer.spec import spec_of
from trainer.step import Trainer
from trainer.strategy import build_strategy

pytestmark = pytest.mark.usefixtures("three_cpus")

NUM_EXAMPLES = 61  # with a batch of 16 an epoch ends with 13 examples: 7 and 6, or 4, 4 and 5
STRATEGIES = {
    "one_device": {"strategy": "one_device"},
    "mirrored ×1": {"strategy": "mirrored", "num_virtual_devices": 1},
    "mirrored ×2": {"strategy": "mirrored", "num_virtual_devices": 2},
    "mirrored ×3": {"strategy": "mirrored", "num_virtual_devices": 3},
    "mirrored ×2, copied in a hierarchy": {
        "strategy": "mirrored", "num_virtual_devices": 2, "cross_device": "hierarchical_copy",
    },
    "central_storage ×2": {"strategy": "central_storage", "num_virtual_devices": 2},
    "central_storage ×3": {"strategy": "central_storage", "num_virtual_devices": 3},
}  # fmt: skip
REPLICAS = ["mirrored ×3", "central_storage ×2"]
MATHEMATICS = {
    "adam": {},
    "sgd": {"optimizer": "sgd", "optimizer_args": {"momentum": 0.9}},
    "weight decay": {"optimizer": "adamw", "optimizer_args": {"weight_decay": 0.1}},
    "clip_value": {"clip_value": 0.01},
    "clip_norm": {"clip_norm": 0.05},
    "clip_global_norm": {"clip_global_norm": 0.05},
    "accumulation": {"gradient_accumulation_steps": 3, "clip_global_norm": 0.1},
    "averages": {"ema_decay": 0.9},
    "class weights": {"class_weights": {"nought": 0.2, "two": 3.0}},
    "regularisation": {"model_args": {"l2": 0.1}},
    "regularisation, accumulated": {"model_args": {"l2": 0.1}, "gradient_accumulation_steps": 2},
    "label smoothing": {"label_smoothing": 0.1},
    "schedule": {"learning_rate_schedule": {"name": "cosine", "warmup_steps": 5}},
    "skip_step": {"nan_policy": "skip_step"},
    "all at once": {
        "optimizer": "adamw", "clip_global_norm": 0.05, "gradient_accumulation_steps": 2, "ema_decay": 0.8,
        "class_weights": {"one": 2.0}, "model_args": {"l2": 0.05}, "label_smoothing": 0.05,
        "learning_rate_schedule": {"name": "linear", "warmup_steps": 3}, "nan_policy": "skip_step",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariance") / "examples"
    write_dataset(folder, train=NUM_EXAMPLES, validation=23, shards=2)
    return folder


@pytest.fixture(scope="module")
def weighted_examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariance") / "weighted"
    write_dataset(folder, train=NUM_EXAMPLES, weighted=True)
    return folder


@pytest.fixture(scope="module")
def train(examples):
    """Trains 8 epochs of 4 steps and gives the weights, averages and calls' sums; each configuration once."""
    done = {}

    def run(folder=examples, **settings):
        key = repr((sorted(settings.items()), folder))
        if key not in done:
            done[key] = _train(folder, settings)
        return done[key]

    return run


def make_trainer(settings, examples):
    import keras

    defaults = {"model": "small_models:plain", "global_batch_size": 16, "learning_rate": 0.01}
    config = parse(TrainConfig, {**defaults, **settings})
    manifest = read_manifest(examples)
    strategy = build_strategy(config)
    keras.utils.set_random_seed(1)
    steps = 8 * math.ceil(NUM_EXAMPLES / 16)
    spec = spec_of(manifest, examples)
    return Trainer(strategy, lambda: build_model(config, spec), config, objective_of(spec, config), steps)


def _train(examples, settings):
    trainer = make_trainer(settings, examples)
    config, manifest = trainer.config, read_manifest(examples)
    feed = open_feed(examples, manifest, "train", seed=3, config=config, shuffle=True)
    steps = math.ceil(feed.num_examples / config.global_batch_size)
    totals = []
    for epoch in range(8):
        iterator = (
            feed.iterator(trainer.strategy, config.global_batch_size, epoch, 0, epoch + 1) if feed.streams else None
        )
        for first, count in ((0, 3), (3, steps - 3)):  # the two calls of an epoch must be one training
            totals.append(trainer.train_steps(feed, iterator, epoch, first, count).totals)
    weights = [weight.numpy() for weight in trainer.model.weights]
    return weights, [average.numpy() for average in trainer.averages], np.array(totals)


def difference(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_the_weights_of_the_default(train, strategy):
    weights, _, totals = train()
    same, _, same_totals = train(**STRATEGIES[strategy])
    assert difference(weights, same) < 1e-6
    np.testing.assert_allclose(same_totals, totals, rtol=1e-5)


@pytest.mark.parametrize("strategy", REPLICAS)
@pytest.mark.parametrize("mathematics", MATHEMATICS)
def test_the_mathematics_do_not_depend_on_the_replicas(train, mathematics, strategy):
    settings = MATHEMATICS[mathematics]
    weights, averages, totals = train(**settings)
    same, same_averages, same_totals = train(**settings, **STRATEGIES[strategy])
    assert difference(weights, same) < 1e-6
    if averages:
        assert difference(averages, same_averages) < 1e-6
    np.testing.assert_allclose(same_totals, totals, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["mirrored ×2", "mirrored ×3", "central_storage ×2"])
def test_weights_of_examples_do_not_depend_on_the_replicas(train, weighted_examples, strategy):
    settings = {"clip_global_norm": 0.1, "gradient_accumulation_steps": 2, "class_weights": {"one": 2.0}}
    weights = train(weighted_examples, **settings)[0]
    assert difference(weights, train(weighted_examples, **settings, **STRATEGIES[strategy])[0]) < 1e-6
    assert difference(weights, train(**settings)[0]) > 1e-4


@pytest.mark.parametrize("mathematics", [name for name in MATHEMATICS if name not in ("adam", "skip_step", "averages")])
def test_every_setting_changes_the_weights(train, mathematics):
    assert difference(train()[0], train(**MATHEMATICS[mathematics])[0]) > 1e-4 or "accumulat" in mathematics


def test_accumulated_parts_equal_the_whole_batch(train):
    whole = train(clip_global_norm=0.1)[0]
    assert difference(whole, train(clip_global_norm=0.1, gradient_accumulation_steps=3)[0]) < 1e-6
    assert difference(whole, train(clip_global_norm=0.1, gradient_accumulation_steps=16)[0]) < 1e-6


@pytest.mark.parametrize("strategy", ["mirrored ×2", "mirrored ×3"])
def test_synchronised_batch_normalisation_sees_the_global_batch(train, strategy):
    # At Adam's large learning rates its division by tiny gradients makes 1e-6 of the last digits of a variance.
    settings = {"model_args": {"batch_norm": "plain"}, "sync_batch_norm": True, "learning_rate": 1e-3}
    weights = train(**settings)[0]  # the moving statistics among them
    assert difference(weights, train(**settings, **STRATEGIES[strategy])[0]) < 1e-6
    apart = train(**settings | STRATEGIES[strategy] | {"sync_batch_norm": False})[0]
    assert difference(weights, apart) > 1e-4


@pytest.mark.parametrize("strategy", ["default", "mirrored ×2"])
def test_eager_execution_gives_the_same_numbers(train, strategy):
    settings = STRATEGIES.get(strategy, {})
    compiled = train(**settings)[0]
    assert difference(compiled, train(eager=True, **settings)[0]) < 1e-6


@pytest.mark.parametrize("strategy", ["default", "mirrored ×2"])
def test_xla_gives_the_same_numbers(train, strategy):
    settings = STRATEGIES.get(strategy, {}) | {"clip_global_norm": 0.1, "model_args": {"l2": 0.01}}
    assert (
        difference(train(clip_global_norm=0.1, model_args={"l2": 0.01})[0], train(jit_compile=True, **settings)[0])
        < 1e-5
    )


@pytest.mark.parametrize("strategy", ["mirrored ×2", "mirrored ×3", "central_storage ×2"])
def test_a_streamed_split_trains_alike_on_any_number_of_replicas(train, strategy):
    weights, _, totals = train(cache_bytes=0)
    same, _, same_totals = train(cache_bytes=0, **STRATEGIES[strategy])
    assert difference(weights, same) < 1e-6
    np.testing.assert_allclose(same_totals, totals, rtol=1e-5)
    assert totals[:, 2].tolist() == train()[2][:, 2].tolist()  # as many examples a call as from memory


# Exactly once: a model whose loss says which examples it saw.


class Witness(Trainer):
    """Adds to the class sums a histogram of the examples' own numbers, one replica at a time."""

    def __init__(self, *args):
        super().__init__(*args)
        with self.strategy.scope():
            self.seen = tf.Variable(
                tf.zeros(256 * 4, tf.int32), trainable=False, synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )  # fmt: skip

    def _note(self, features):
        images = features["image"]
        numbers = tf.cast(images[:, 0, 0, 0], tf.int32) + 256 * tf.cast(images[:, 0, 1, 0], tf.int32)
        self.seen.assign_add(tf.math.bincount(numbers, minlength=1024, maxlength=1024))

    def _train_share(self, size, features, labels):
        self._note(features)
        return super()._train_share(size, features, labels)

    def _evaluate_share(self, size, features, labels):
        self._note(features)
        return super()._evaluate_share(size, features, labels)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("cache_bytes", [0, 2**30])
@pytest.mark.parametrize("strategy", ["default", "mirrored ×2", "mirrored ×3"])
def test_an_epoch_and_an_evaluation_see_every_example_exactly_once(tmp_path, strategy, cache_bytes, shards):
    manifest = write_dataset(tmp_path / "examples", train=37, validation=11, shards=shards)
    settings = {"model": "small_models:plain", "global_batch_size": 8, "cache_bytes": cache_bytes}
    config = parse(TrainConfig, {**settings, **STRATEGIES.get(strategy, {})})
    strategy = build_strategy(config)
    spec = spec_of(manifest, tmp_path / "examples")
    trainer = Witness(strategy, lambda: build_model(config, spec), config, objective_of(spec, config), 10)
    for split, run in (("train", "train_steps"), ("validation", "evaluate")):
        feed = open_feed(tmp_path / "examples", manifest, split, seed=3, config=config, shuffle=split == "train")
        for epoch in range(2 if split == "train" else 1):
            iterator = feed.iterator(strategy, 8, epoch, 0, epoch + 1) if feed.streams else None
            steps = math.ceil(feed.num_examples / 8)
            numbers = (epoch, 0, steps) if split == "train" else (steps,)
            getattr(trainer, run)(feed, iterator, *numbers)
            seen = sum(part.numpy() for part in strategy.experimental_local_results(trainer.seen))
            assert seen[: feed.num_examples].tolist() == [1] * feed.num_examples
            assert seen.sum() == feed.num_examples
            for part in strategy.experimental_local_results(trainer.seen):
                part.assign(tf.zeros_like(part))


@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test_every_epoch_has_an_order_of_its_own_and_the_seed_decides_it(tmp_path, cache_bytes):
    manifest = write_dataset(tmp_path / "examples", train=40)
    config = parse(TrainConfig, {"cache_bytes": cache_bytes})

    def order(seed, epoch):
        feed = open_feed(tmp_path / "examples", manifest, "train", seed=seed, config=config, shuffle=True)
        if not feed.streams:
            return feed.take(tf.constant(epoch, tf.int64), 0, 40)[0]["image"].numpy()[:, 0, 0, 0].tolist()
        features, _ = next(feed.iterator(tf.distribute.get_strategy(), 40, epoch, 0, epoch + 1))
        return features["image"].numpy()[:, 0, 0, 0].tolist()

    assert order(3, 0) == order(3, 0)
    assert len({tuple(order(seed, epoch)) for seed in (3, 4) for epoch in (0, 1)}) == 4
    assert sorted(order(3, 0)) == list(range(40))
