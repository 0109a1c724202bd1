"""How fast the train loop is, as ratios measured side by side in one run; over 1 means that this project is faster.

    python benchmarks/training.py                # every ratio
    python benchmarks/training.py --rounds 3 --only cnn

Each line is the median of the rounds' ratios. In a round every side trains the same steps on the same data, one right after
the other and each round in another order, so that a noisy machine disturbs all alike. The whole takes about ten minutes on
two cores, most of them for Keras' convolutions under XLA.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from trainer.checkpoint import Checkpoints, State
from trainer.cluster import configure_collective_timeouts, describe
from trainer.config import TrainConfig
from trainer.consensus import Consensus
from trainer.data.manifest import Feature, Label
from trainer.data.reading import MemoryFeed
from trainer.data.statistics import FeatureStatistics
from trainer.launch.local import run_group
from trainer.models import build_model
from trainer.objective import objective_of
from trainer.rendezvous import wait_for_peers
from trainer.spec import ModelSpec
from trainer.step import Trainer
from trainer.strategy import build_strategy

CASES = {
    "cnn": TrainConfig(model="cnn", global_batch_size=64),
    "mlp": TrainConfig(model="mlp", global_batch_size=256),
}
STEPS = {"cnn": 100, "mlp": 400}
GOALS = {
    "cnn": {"fit, best": 1.0, "fit, default": 1.3, "textbook loop": 1.3, "limit": 0.95, "checkpoints": 0.95},
    "mlp": {"textbook loop": 1.3, "checkpoints": 0.95},
    # Keras' own best is with XLA there, and so is ours.
    "mlp, jit_compile": {"fit, best": 1.1, "fit, default": 2.2, "textbook loop": 1.3},
}
SCALING_GOAL = 0.85


def main() -> None:
    """Prints a table of ratios, and the same as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds to measure (default: %(default)s)")
    parser.add_argument("--only", choices=[*CASES, "scaling"], help="one case only")
    parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member:
        return _member(arguments.rounds)
    found = {}
    for name in CASES if arguments.only is None else [arguments.only]:
        if name in CASES:
            for form, ratios in _case(name, arguments.rounds).items():
                found[form] = ratios
                for rival, ratio in ratios.items():
                    print(
                        f"{form:<16} against {rival:<28} {ratio:5.2f}{_goal(GOALS.get(form, {}).get(rival))}",
                        flush=True,
                    )
    if arguments.only in (None, "scaling"):
        found["scaling"] = ratio = _scaling(arguments.rounds)
        print(f"weak scaling, 2 workers on a core each {ratio:5.2f}{_goal(SCALING_GOAL)}", flush=True)
    print(json.dumps(found))
    return None


def _goal(goal: float | None) -> str:
    return "" if goal is None else f"   (goal: at least {goal})"


def _case(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """Ratios of one model by the form of our loop and the rival: the rival's time over ours for the same steps."""
    config, steps = CASES[name], STEPS[name]
    images, labels = _data(config.global_batch_size * steps)
    compiled = config.model_copy(update={"jit_compile": True})
    forms = {
        name: _own_loop(config, images, labels, steps),
        f"{name}, jit_compile": _own_loop(compiled, images, labels, steps),
    }
    rivals = {
        "fit, default": _fit(config, images, labels),
        "fit, steps_per_execution": _fit(config, images, labels, steps_per_execution=32),
        "fit, jit_compile": _fit(config, images, labels, jit_compile=True),
        "fit, both": _fit(config, images, labels, steps_per_execution=32, jit_compile=True),
        "textbook loop": _textbook(config, images, labels),
        "Keras' own update": _own_loop(config, images, labels, steps, update_of_keras=True),
    }
    limits = {
        name: _constant_batch(config, images, labels, steps),
        f"{name}, jit_compile": _constant_batch(compiled, images, labels, steps),
    }
    seconds = _seconds({**forms, **rivals, **{f"limit of {form}": limit for form, limit in limits.items()}}, rounds)
    found = {}
    for form in forms:
        ratios = {rival: _median_ratio(seconds[rival], seconds[form]) for rival in rivals}
        ratios["fit, best"] = min(ratio for rival, ratio in ratios.items() if rival.startswith("fit"))
        ratios["limit"] = _median_ratio(seconds[f"limit of {form}"], seconds[form])
        found[form] = ratios
    with tempfile.TemporaryDirectory() as folder:
        # At least 400 steps a side: a checkpoint is written while the next steps run, and only the last one is waited for.
        epochs = max(1, 400 // steps)
        saving = _own_loop(config, images, labels, steps, epochs=epochs, checkpoints=Path(folder))
        seconds = _seconds({"plain": _own_loop(config, images, labels, steps, epochs=epochs), "saving": saving}, rounds)
    found[name]["checkpoints"] = _median_ratio(seconds["plain"], seconds["saving"])
    return found


def _seconds(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """How long each side took in each round."""
    for run in sides.values():
        run()  # compiles
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):  # the order turns, so that no side always comes after the same other
        order = list(sides)
        for side in order[number % len(order) :] + order[: number % len(order)]:
            began = time.perf_counter()
            sides[side]()
            seconds[side].append(time.perf_counter() - began)
    return seconds


def _median_ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _data(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.integers(0, 256, (count, 28, 28, 1), np.uint8), random.integers(0, 10, count).astype(np.int32)


def _spec() -> ModelSpec:
    label = Label(name="label", class_names=[str(digit) for digit in range(10)])
    features = {"image": Feature(kind="image", shape=(28, 28, 1))}
    return ModelSpec(features, label, {"label": FeatureStatistics(kind="category", num_examples=1)})


def _trainer(config: TrainConfig, strategy: object) -> Trainer:
    return Trainer(strategy, lambda: build_model(config, _spec()), config, objective_of(_spec(), config), 10_000)


def _own_loop(
    config: TrainConfig,
    images: np.ndarray,
    labels: np.ndarray,
    steps: int,
    *,
    epochs: int = 1,
    checkpoints: Path | None = None,
    update_of_keras: bool = False,
) -> Callable[[], None]:
    """Epochs of this project's loop, in calls of 100 steps, with a checkpoint after each where a folder is given."""
    import tensorflow as tf

    trainer = _trainer(config, tf.distribute.get_strategy())
    if update_of_keras:
        del trainer.optimizer.update_step  # ours hides that of the class
    feed = MemoryFeed(({"image": images}, labels), 7, shuffle=True)
    saver = Checkpoints(checkpoints, trainer, {}, 3) if checkpoints else None
    done = [0, 0]

    def run() -> None:
        for _ in range(epochs):
            for first in range(0, steps, 100):
                trainer.train_steps(feed, None, done[0], first, min(100, steps - first))
                if saver:
                    done[1] += 100
                    saver.save(State(step=done[1]))
            done[0] += 1
        if saver:
            saver.wait()

    return run


def _constant_batch(config: TrainConfig, images: np.ndarray, labels: np.ndarray, steps: int) -> Callable[[], None]:
    """The same compiled step on one batch that is always there: the limit."""
    import tensorflow as tf

    class Constant:
        streams, num_examples = False, len(labels)
        batch = (
            {"image": tf.constant(images[: config.global_batch_size])},
            tf.constant(labels[: config.global_batch_size]),
        )

        def take(self, epoch: object, start: object, count: object) -> tuple:
            return self.batch

    trainer, feed = _trainer(config, tf.distribute.get_strategy()), Constant()

    def run() -> None:
        for first in range(0, steps, 100):
            trainer.train_steps(feed, None, 0, first, min(100, steps - first))

    return run


def _fit(config: TrainConfig, images: np.ndarray, labels: np.ndarray, **how: object) -> Callable[[], None]:
    """An epoch of Keras' fit on the same arrays."""
    import keras

    model = build_model(config, _spec())
    model.compile(
        keras.optimizers.Adam(config.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=how.get("jit_compile", False),
        steps_per_execution=how.get("steps_per_execution", 1),
    )
    return lambda: model.fit({"image": images}, labels, config.global_batch_size, verbose=0)


def _textbook(config: TrainConfig, images: np.ndarray, labels: np.ndarray) -> Callable[[], None]:
    """TensorFlow's guide to custom loops: one strategy.run and one strategy.reduce a batch, from Python."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["/cpu:0"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    batch = config.global_batch_size
    with strategy.scope():
        model = build_model(config, _spec())
        optimizer = keras.optimizers.Adam(config.learning_rate)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    dataset = tf.data.Dataset.from_tensor_slices(({"image": images}, labels)).shuffle(10_000).batch(batch)
    distributed = strategy.experimental_distribute_dataset(dataset.prefetch(tf.data.AUTOTUNE))

    def step(features: object, label: object) -> object:
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            loss = tf.reduce_sum(loss_of(label, logits)) / batch
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(label, logits)
        return loss

    @tf.function
    def distributed_step(features: object, label: object) -> object:
        return strategy.reduce("SUM", strategy.run(step, args=(features, label)), axis=None)

    def run() -> None:
        total = 0.0
        for features, label in distributed:
            total += distributed_step(features, label)
        float(total)

    return run


def _scaling(rounds: int) -> float:
    """Examples/s of two workers, a core each, over twice those of one worker on one core: the median of the turns' ratios."""
    said: list[str] = []
    with tempfile.TemporaryDirectory() as logs:
        result = run_group(
            [sys.executable, str(Path(__file__).resolve()), "--member", "--rounds", str(rounds)],
            2,
            max_restarts=0,
            grace_period_secs=1,
            log_folder=Path(logs),
            emit=lambda source, line: said.append(line),
        )
    assert result.exit_code == 0, "\n".join(said[-20:])
    turns = next(json.loads(line) for line in said if line.startswith('[{"alone"'))
    print("weak scaling, milliseconds a step: " + json.dumps(turns), file=sys.stderr)
    return statistics.median(turn["alone"] / turn["together"] for turn in turns)


def _member(rounds: int) -> None:
    """One of two workers, pinned to one core, with 128 examples a step of its own: over 20 ms.

    One alone and both together take turns in the same two processes, so that a busy machine disturbs both alike.
    """
    import tensorflow as tf

    description = describe(os.environ)
    assert description is not None
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[description.task_index % len(cores)]})
    config = TrainConfig(model="cnn", global_batch_size=256, strategy="multi_worker_mirrored")
    wait_for_peers(description, 120)
    configure_collective_timeouts(description)
    strategy = build_strategy(config, description)
    consensus = Consensus(strategy, description)

    def side(settings: TrainConfig, strategy: object) -> Callable[[int, int], float]:
        trainer = _trainer(settings, strategy)
        images, labels = _data(settings.global_batch_size * 40)
        feed = MemoryFeed(({"image": images}, labels), 7, shuffle=True)

        def milliseconds(first: int, steps: int) -> float:
            began = time.perf_counter()
            trainer.train_steps(feed, None, 0, first, steps)
            return 1000 * (time.perf_counter() - began) / steps

        milliseconds(0, 5)  # compiles
        return milliseconds

    alone = side(TrainConfig(model="cnn", global_batch_size=128), tf.distribute.get_strategy())
    together = side(config, strategy)
    turns = []
    for _ in range(rounds):
        consensus.wait()
        one = alone(5, 35) if description.is_chief else 0.0
        consensus.wait()  # where the other was waiting
        turns.append({"alone": one, "together": together(5, 35)})
    if description.is_chief:
        print(json.dumps(turns), flush=True)


if __name__ == "__main__":
    main()
