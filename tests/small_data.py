"""A prepared dataset that is made in milliseconds: what trainer.data.prepare writes, without a source."""

import hashlib
from pathlib import Path

import numpy as np
import tensorflow as tf

from trainer.data.manifest import Feature, Label, Manifest, Shard, Split, write_manifest
from trainer.data.schema import SCHEMA_FILE, infer_schema
from trainer.data.statistics import FeatureStatistics, Statistics, ValueCount, write_statistics

CLASS_NAMES = ["nought", "one", "two"]


def write_dataset(
    folder: Path,
    *,
    train: int = 61,
    validation: int = 0,
    test: int = 16,
    shards: int = 1,
    side: int = 4,
    weighted: bool = False,
) -> Manifest:
    """Images whose mean brightness tells the class, with noise; the same bytes every time.

    The first pixel of image i is i % 256 and the second i // 256, so that every example can be told from the others.
    With `weighted` each example has a weight from 0 to 2.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(5)
    splits, statistics = {}, {}
    for name, count in (("train", train), ("validation", validation), ("test", test)):
        if not count:
            continue
        labels = random.integers(0, 3, count)
        images = np.clip(random.normal(60 + 60 * labels[:, None, None, None], 25, (count, side, side, 1)), 0, 255)
        images = images.astype(np.uint8)
        images[:, 0, 0, 0], images[:, 0, 1, 0] = np.arange(count) % 256, np.arange(count) // 256
        weights = random.uniform(0.0, 2.0, count)
        written = []
        for shard, places in enumerate(np.array_split(np.arange(count), shards)):
            path = folder / f"{name}-{shard:05d}-of-{shards:05d}.tfrecord"
            with tf.io.TFRecordWriter(str(path)) as writer:
                for place in places:
                    writer.write(_record(images[place], labels[place], weights[place] if weighted else None))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            size = path.stat().st_size
            written.append(Shard(name=path.name, num_examples=len(places), num_bytes=size, sha256=digest))
        counts = np.bincount(labels, minlength=3).tolist()
        splits[name] = Split(num_examples=count, label_counts=counts, shards=written)
        values = [ValueCount(value=value, count=number) for value, number in zip(CLASS_NAMES, counts, strict=True)]
        statistics[name] = {
            "image": FeatureStatistics(kind="image", num_examples=count),
            "label": FeatureStatistics(kind="category", num_examples=count, values=values),
        }
    manifest = Manifest(
        source={"kind": "test"},
        features={"image": Feature(kind="image", shape=(side, side, 1))},
        label=Label(name="label", class_names=CLASS_NAMES),
        weight="weight" if weighted else None,
        splits=splits,
        statistics_sha256=write_statistics(folder, Statistics(splits=statistics)),
    )
    (folder / SCHEMA_FILE).write_text(infer_schema(manifest, Statistics(splits=statistics)).to_text(), encoding="utf-8")
    return write_manifest(folder, manifest)


def _record(image: np.ndarray, label: int, weight: float | None) -> bytes:
    example = tf.train.Example()
    example.features.feature["image"].bytes_list.value.append(image.tobytes())
    example.features.feature["label"].int64_list.value.append(int(label))
    if weight is not None:
        example.features.feature["weight"].float_list.value.append(weight)
    return example.SerializeToString(deterministic=True)
