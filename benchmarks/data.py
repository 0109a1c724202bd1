"""How good preparing and reading are: ratios, measured side by side in one run.

    python benchmarks/data.py [--num-examples 20000] [--rounds 5]

Reading is compared with a bare parallel `TFRecordDataset` + `parse_example` + decode of the same files, and with
`tfds.load(…).shuffle.batch.prefetch` on the same images in TFDS's default encoding (PNG). Preparing is compared with two
processes that merely copy the same serialized records into shards. The best of the rounds counts, the sides take turns.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BATCH = 128
SHAPE = (32, 32, 3)
COPY = """
import sys
from pathlib import Path
from trainer.data.frames import FrameWriter, read_frames
for source in sys.argv[2:]:
    with FrameWriter(Path(sys.argv[1]) / Path(source).name) as writer:
        for record in read_frames(Path(source)):
            writer.write(record)
"""


def make_source(folder, num_examples):
    """Records of smooth 32×32×3 images in four files; as they compress like photographs, PNG has its usual work."""
    from trainer.data.frames import FrameWriter
    from trainer.data.manifest import Feature
    from trainer.data.records import Encoder, finish, label_entry

    chance = np.random.default_rng(7)
    encode = Encoder({"image": Feature(kind="image", shape=SHAPE)})
    files = [folder / f"part{number}.tfrecord" for number in range(4)]
    for number, file in enumerate(files):
        with FrameWriter(file) as writer:
            for _ in range(number, num_examples, 4):
                coarse = chance.integers(0, 255, (8, 8, 3))
                image = np.clip(np.kron(coarse, np.ones((4, 4, 1))) + chance.normal(0, 4, SHAPE), 0, 255)
                label = int(chance.integers(10))
                writer.write(finish(encode({"image": image.astype(np.uint8)}), label_entry("label", label)))
    return files


def prepare_config(folder):
    from trainer.config import DataConfig, RecordFeature, Splits

    return DataConfig(
        source="tfrecord", path=str(folder), label_key="label", kinds={"image": "image"}, min_shards=4,
        splits=Splits(train="90%", validation=None, test="10%"),
        record_features={"image": RecordFeature(type="bytes", shape=SHAPE), "label": RecordFeature(type="int64")},
    )  # fmt: skip


def as_tfds(folder, images, labels):
    """The same images as a TFDS builder in its default encoding."""
    import tensorflow_datasets as tfds

    class BenchmarkImages(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"image": tfds.features.Image(shape=SHAPE), "label": tfds.features.ClassLabel(num_classes=10)}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for number, (image, label) in enumerate(zip(images, labels, strict=True)):
                yield number, {"image": image, "label": int(label)}

    BenchmarkImages(data_dir=folder).download_and_prepare()
    return lambda: (
        tfds.load("benchmark_images", data_dir=folder, split="train", as_supervised=True)
        .shuffle(10_000)
        .batch(BATCH)
        .prefetch(2)
    )


def seconds(consume):
    started = time.perf_counter()
    consume()
    return time.perf_counter() - started


def best(rounds, **sides):
    """Seconds of the best round of each side; they take turns, so that a busy machine is busy for all."""
    found = {name: [] for name in sides}
    for _ in range(rounds + 1):  # the first one warms up
        for name, consume in sides.items():
            found[name].append(seconds(consume))
    return {name: min(times[1:]) for name, times in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-examples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(Path(temporary), arguments.num_examples, arguments.rounds)


def measure(folder, num_examples, rounds):
    """Prints every ratio."""
    from trainer.data.prepare import prepare

    (folder / "source").mkdir()
    files = make_source(folder / "source", num_examples)
    turn = iter(range(1000))

    def targets(kind):
        return folder / f"{kind}{next(turn)}"

    def prepared():
        prepare(prepare_config(folder / "source"), 7, targets("prepared"), num_workers=2)

    def copied():
        target = targets("copied")
        target.mkdir()
        halves = [list(map(str, files[:2])), list(map(str, files[2:]))]
        running = [subprocess.Popen([sys.executable, "-c", COPY, str(target), *half]) for half in halves]
        assert [process.wait() for process in running] == [0, 0]

    found = best(max(1, rounds // 2), prepare=prepared, copy=copied)
    report("prepare", num_examples / found["prepare"], "copy with two processes", num_examples / found["copy"], 0.5)

    # Not before: preparing files needs no TensorFlow, and is quicker in a process without it.
    import tensorflow as tf

    from trainer.config import TrainConfig
    from trainer.data.manifest import read_manifest
    from trainer.data.reading import StreamFeed, load_split, open_feed
    from trainer.data.records import parser

    examples = next(folder.glob("prepared*"))
    manifest = read_manifest(examples)
    count = manifest.splits["train"].num_examples
    names = [str(examples / shard.name) for shard in manifest.splits["train"].shards]
    parse = parser(manifest)
    strategy = tf.distribute.get_strategy()
    config = TrainConfig(global_batch_size=BATCH)
    memory = open_feed(examples, manifest, "train", seed=7, config=config, shuffle=True)
    streams = {
        kind: StreamFeed(names, count, parse, 7, buffer_examples=buffer)
        for kind, buffer in (("in order", 0), ("shuffled", min(count, 10_000)))
    }
    as_default = as_tfds(folder / "tfds", *_images(load_split(examples, manifest, "train")))

    @tf.function
    def drain(iterator, steps):
        total = tf.constant(0, tf.int64)
        for _ in tf.range(steps):
            total += tf.shape(next(iterator)[-1], tf.int64)[0]
        return total

    @tf.function
    def gather(epoch, steps):
        total = tf.constant(0, tf.int64)
        for step in tf.range(steps):
            start = step * BATCH
            size = tf.minimum(tf.constant(BATCH, tf.int64), count - start)
            total += tf.shape(memory.take(epoch, start, size)[1], tf.int64)[0]
        return total

    steps = tf.constant(-(-count // BATCH), tf.int64)

    def bare():
        records = tf.data.TFRecordDataset(names, num_parallel_reads=tf.data.AUTOTUNE, buffer_size=4 * 1024**2)
        batches = records.batch(BATCH).map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
        assert drain(iter(batches), steps) == count

    found = best(
        rounds,
        bare=bare,
        memory=lambda: gather(tf.constant(1, tf.int64), steps),
        tfds=lambda: drain(iter(as_default()), steps),
        **{kind: lambda feed=feed: drain(feed.iterator(strategy, BATCH, 0, 0, 1), steps) for kind, feed in streams.items()},
    )  # fmt: skip
    rates = {kind: count / took for kind, took in found.items()}
    for kind in ("in order", "shuffled", "memory"):
        report(f"read, {kind}", rates[kind], "bare TFRecordDataset", rates["bare"], 0.9)
    for kind in ("shuffled", "memory"):
        report(f"read, {kind}", rates[kind], "tfds.load", rates["tfds"], 5.0)


def _images(batch):
    return batch[0]["image"], batch[1]


def report(what, rate, against, other, wanted):
    verdict = "holds" if rate >= wanted * other else "DOES NOT HOLD"
    print(
        f"{what}: {rate:,.0f} images/s; {against}: {other:,.0f}; ratio {rate / other:.2f} (at least {wanted}: {verdict})",
        flush=True,
    )


if __name__ == "__main__":
    main()
