"""A prepared split as batches: the same order, and every example once, however many replicas share them.

    feed = open_feed(folder, manifest, "train", seed=7, config=config)
    images, labels = feed.take(epoch, start, count)        # inside the graph, for a split held in memory

The order of an epoch is a permutation computed from seed and epoch, so a position in it is a number: resuming needs no replay.
Records are parsed in batches, which is 6 times cheaper than one by one.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import TrainConfig
from trainer.data.manifest import Manifest, verify


class MemoryFeed:
    """A split held in memory; each replica gathers its own share inside the graph.

    Attributes:
        num_examples: Examples of the split.
    """

    streams = False

    def __init__(self, images: np.ndarray, labels: np.ndarray, seed: int, *, shuffle: bool) -> None:
        import tensorflow as tf

        self.num_examples = len(labels)
        self._seed, self._shuffle = seed, shuffle
        with tf.device("/cpu:0"):
            self._images, self._labels = tf.constant(images), tf.constant(labels, tf.int32)

    def first(self, count: int) -> tuple[Any, Any]:
        """The first examples as they were written."""
        return self._images[:count], self._labels[:count]

    def take(self, epoch: Any, start: Any, count: Any) -> tuple[Any, Any]:
        """Examples `start` to `start + count` of the epoch's order.

        Returns:
            Images [count, height, width, channels] uint8 and labels [count] int32.
        """
        import tensorflow as tf

        with tf.device("/cpu:0"):
            places = tf.range(start, start + count, dtype=tf.int64)
            if not self._shuffle:
                return self._images[start : start + count], self._labels[start : start + count]
            seed = tf.stack([tf.constant(self._seed, tf.int64), tf.cast(epoch, tf.int64)])
            places = tf.random.experimental.index_shuffle(places, seed, tf.constant(self.num_examples - 1, tf.int64))
            return tf.gather(self._images, places), tf.gather(self._labels, places)


class StreamFeed:
    """A split too large for memory; every worker reads the records in the same order and parses its replicas' shares.

    Attributes:
        num_examples: Examples of the split.
    """

    streams = True

    def __init__(
        self, files: list[str], num_examples: int, image_shape: tuple[int, ...], seed: int, *, buffer_examples: int
    ) -> None:
        self.num_examples = num_examples
        self._files, self._image_shape = files, image_shape
        self._seed, self._buffer = seed, buffer_examples

    def first(self, count: int) -> tuple[Any, Any]:
        """The first examples as they were written."""
        import tensorflow as tf

        return self._parse(next(iter(tf.data.TFRecordDataset(self._files).batch(count))))

    def iterator(self, strategy: Any, batch_size: int, first_epoch: int, start: int, num_epochs: int) -> Any:
        """Per-replica batches (images, labels) from example `start` of `first_epoch` on.

        Args:
            strategy: The strategy whose replicas share each batch.
            batch_size: Examples of a global batch.
            first_epoch: Epoch (from 0) to begin in; it decides the order.
            start: Examples of that epoch to pass over; a multiple of the batch size.
            num_epochs: Epoch at which the data ends.
        """
        import tensorflow as tf

        num_replicas = strategy.num_replicas_in_sync

        def epoch_batches(epoch: Any) -> Any:
            records = tf.data.TFRecordDataset(self._files, buffer_size=4 * 1024**2)
            if self._buffer:
                records = records.shuffle(
                    self._buffer, seed=self._seed * 1_000_003 + epoch, reshuffle_each_iteration=False
                )
            passed = tf.where(epoch == first_epoch, tf.constant(start, tf.int64), 0)
            return records.skip(passed).batch(batch_size)

        def per_worker(context: Any) -> Any:
            local = num_replicas // context.num_input_pipelines
            first = context.input_pipeline_id * local

            def shares(records: Any) -> Any:
                size = tf.shape(records, tf.int64)[0]
                replicas = tf.data.Dataset.range(first, first + local)
                return replicas.map(lambda r: records[size * r // num_replicas : size * (r + 1) // num_replicas])

            dataset = tf.data.Dataset.range(first_epoch, num_epochs).flat_map(epoch_batches).flat_map(shares)
            return dataset.map(self._parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(
                tf.data.AUTOTUNE
            )

        return iter(strategy.distribute_datasets_from_function(per_worker))

    def _parse(self, records: Any) -> tuple[Any, Any]:
        return parse_records(records, self._image_shape)


def open_feed(
    folder: Path, manifest: Manifest, split: str, *, seed: int, config: TrainConfig, shuffle: bool
) -> MemoryFeed | StreamFeed:
    """The split in memory where it fits `train.cache_bytes`, else as a stream. Its shards are verified first.

    Raises:
        WorldFailure: A shard is missing or damaged.
    """
    verify(folder, manifest, [split])
    files = [str(folder / shard.name) for shard in manifest.splits[split].shards]
    num_examples = manifest.splits[split].num_examples
    example_bytes = math.prod(manifest.image.shape)
    if num_examples * example_bytes <= config.cache_bytes:
        images, labels = load_split(folder, manifest, split)
        return MemoryFeed(images, labels, seed, shuffle=shuffle)
    buffer = max(1, min(num_examples, config.shuffle_buffer_bytes // (example_bytes + 64))) if shuffle else 0
    return StreamFeed(files, num_examples, manifest.image.shape, seed, buffer_examples=buffer)


def load_split(folder: Path, manifest: Manifest, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, height, width, channels] uint8 and labels [n] int64 of a whole split, in the order they were written."""
    import tensorflow as tf

    files = [str(folder / shard.name) for shard in manifest.splits[split].shards]
    num_examples = manifest.splits[split].num_examples
    images = np.empty((num_examples, *manifest.image.shape), np.uint8)
    labels = np.empty(num_examples, np.int64)
    done = 0
    batches = tf.data.TFRecordDataset(files).batch(1024)
    for some_images, some_labels in batches.map(lambda records: parse_records(records, manifest.image.shape)):
        count = len(some_labels)
        images[done : done + count] = some_images.numpy()
        labels[done : done + count] = some_labels.numpy()
        done += count
    assert done == num_examples, f"{split}: {done} records, the manifest says {num_examples}"
    return images, labels


def parse_records(records: Any, image_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Serialized examples [batch] string → images [batch, *image_shape] uint8 and labels [batch] int32."""
    import tensorflow as tf

    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    parsed = tf.io.parse_example(records, features)
    images = tf.reshape(tf.io.decode_raw(parsed["image"], tf.uint8), [-1, *image_shape])
    return images, tf.cast(parsed["label"], tf.int32)
