"""A prepared split as batches: the same order, and every example once, however many replicas share them.

    feed = open_feed(folder, manifest, "train", seed=7, config=config)
    features, labels = feed.take(epoch, start, count)        # inside the graph, for a split held in memory

The order of an epoch is a permutation computed from seed and epoch, so a position in it is a number: resuming needs no replay.
Records are parsed in batches, which is 6 times cheaper than one by one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import TrainConfig
from trainer.data.manifest import Manifest
from trainer.data.records import parser
from trainer.data.shard_files import shard_files, shard_paths
from trainer.errors import BadInput
from trainer.storage import is_remote

_FILES_AT_ONCE = 4  # fixed, because the order of the records follows from it
_BATCHES_AHEAD = 16
_READ_BYTES = 8 * 1024**2  # of a file at a time: in a bucket, one request
_RECORDS_TOGETHER = 8
_BATCHES_SORTED = 32  # batches in a row whose texts are sorted by length together


class MemoryFeed:
    """A split held in memory; each replica gathers its own share inside the graph.

    With `lengths` [n] and a batch size, examples of about the same length share a batch.

    Attributes:
        num_examples: Examples of the split.
    """

    streams = False

    def __init__(
        self,
        batch: tuple[Any, ...],
        seed: int,
        *,
        shuffle: bool,
        lengths: np.ndarray | None = None,
        batch_size: int = 0,
    ) -> None:
        import tensorflow as tf

        self.num_examples = len(batch[1])
        self._seed, self._shuffle = seed, shuffle
        with tf.device("/cpu:0"):
            self._batch = tf.nest.map_structure(tf.constant, batch)
            self._lengths = None if lengths is None else tf.constant(lengths)
        self._batch_size = batch_size

    def first(self, count: int) -> tuple[Any, ...]:
        """The first examples as they were written."""
        import tensorflow as tf

        return tf.nest.map_structure(lambda values: values[:count], self._batch)

    def take(self, epoch: Any, start: Any, count: Any) -> tuple[Any, ...]:
        """Examples `start` to `start + count` of the epoch's order, as `records.parser` gives them."""
        import tensorflow as tf

        with tf.device("/cpu:0"):
            if not self._shuffle:
                return tf.nest.map_structure(lambda values: values[start : start + count], self._batch)
            if self._lengths is None:
                return take(self._batch, self.num_examples, self._seed, epoch, start, count)
            places = self._by_length(start, count, _key(self._seed, epoch))
            return tf.nest.map_structure(lambda values: tf.gather(values, places), self._batch)

    def _by_length(self, start: Any, count: Any, seed: Any) -> Any:
        """Places of examples `start` to `start + count` when texts of about the same length share a batch.

        The permuted examples of some batches in a row are sorted by their length; then the batches are permuted, all but a
        last one that is shorter. Everything follows from seed, epoch and place, so replicas and restarts agree.
        """
        import tensorflow as tf

        size = self._batch_size
        low = start // (size * _BATCHES_SORTED) * (size * _BATCHES_SORTED)
        high = tf.minimum(low + size * _BATCHES_SORTED, tf.constant(self.num_examples, tf.int64))
        window = _shuffled(tf.range(low, high, dtype=tf.int64), seed, self.num_examples)
        window = tf.gather(window, tf.argsort(tf.gather(self._lengths, window), stable=True))
        batch, full = (start - low) // size, (high - low) // size
        turned = _shuffled(tf.minimum(batch, tf.maximum(full - 1, 0)), seed + 1, tf.maximum(full, 1))
        batch = tf.where(batch < full, turned, batch)
        first = batch * size + (start - low) % size
        return window[first : first + count]


def take(batch: tuple[Any, ...], num_examples: int, seed: int, epoch: Any, start: Any, count: Any) -> tuple[Any, ...]:
    """Examples `start` to `start + count` of an epoch's order, gathered from a whole split."""
    import tensorflow as tf

    places = _shuffled(tf.range(start, start + count, dtype=tf.int64), _key(seed, epoch), num_examples)
    return tf.nest.map_structure(lambda values: tf.gather(values, places), batch)


def _key(seed: int, epoch: Any) -> Any:
    import tensorflow as tf

    return tf.stack([tf.constant(seed, tf.int64), tf.cast(epoch, tf.int64)])


def _shuffled(places: Any, key: Any, count: Any) -> Any:
    """Where the places of an order of `count` lie in a permutation of it, which needs no array."""
    import tensorflow as tf

    return tf.random.experimental.index_shuffle(places, key, tf.cast(count, tf.int64) - 1)


class StreamFeed:
    """A split too large for memory; every worker reads the records in the same order and parses its replicas' shares.

    Attributes:
        num_examples: Examples of the split.
    """

    streams = True

    def __init__(
        self, files: list[str], num_examples: int, parse: Callable, seed: int, *, buffer_examples: int
    ) -> None:
        self.num_examples = num_examples
        self._files, self._parse = files, parse
        self._seed, self._buffer = seed, buffer_examples

    def first(self, count: int) -> tuple[Any, ...]:
        """The first examples as they were written."""

        return self._parse(next(iter(_records(self._files).batch(count))))

    def iterator(self, strategy: Any, batch_size: int, first_epoch: int, start: int, num_epochs: int) -> Any:
        """Per-replica batches from example `start` of `first_epoch` on.

        Args:
            strategy: The strategy whose replicas share each batch.
            batch_size: Examples of a global batch.
            first_epoch: Epoch (from 0) to begin in; it decides the order.
            start: Examples of that epoch to pass over; a multiple of the batch size.
            num_epochs: Epoch at which the data ends.
        """
        import tensorflow as tf

        num_replicas = strategy.num_replicas_in_sync

        def per_worker(context: Any) -> Any:
            local = num_replicas // context.num_input_pipelines
            first = context.input_pipeline_id * local

            def shares(records: Any) -> Any:
                size = tf.shape(records, tf.int64)[0]
                replicas = tf.data.Dataset.range(first, first + local)
                return replicas.map(lambda r: records[size * r // num_replicas : size * (r + 1) // num_replicas])

            dataset = self._batches(first_epoch, start, batch_size)
            for epoch in range(first_epoch + 1, num_epochs):
                dataset = dataset.concatenate(self._batches(epoch, 0, batch_size))
            if num_replicas > 1:
                dataset = dataset.flat_map(shares)
            dataset = dataset.prefetch(_BATCHES_AHEAD)  # so that reading does not wait for parsing
            parsed = dataset.map(self._parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
            # Workers ask one another before every batch of a data set that may end whether there is one more. Nobody
            # reads past the end here, because the number of steps is known.
            endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
            return parsed.prefetch(tf.data.AUTOTUNE).apply(endless)

        return iter(strategy.distribute_datasets_from_function(per_worker))

    def _batches(self, epoch: int, start: int, batch_size: int) -> Any:
        """Serialized records [batch] of an epoch, in an order that depends on nothing but seed, epoch and files."""
        import tensorflow as tf

        records = tf.data.Dataset.from_tensor_slices(self._files).interleave(
            _records,
            cycle_length=_FILES_AT_ONCE, block_length=16, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True,
        )  # fmt: skip
        if not self._buffer:
            return records.skip(start).batch(batch_size)
        # Neighbours were permuted when they were written; moving a few together costs a third of moving each alone.
        blocks = records.batch(_RECORDS_TOGETHER)
        seed = self._seed * 1_000_003 + epoch
        blocks = blocks.shuffle(-(-self._buffer // _RECORDS_TOGETHER), seed=seed, reshuffle_each_iteration=False)
        return blocks.rebatch(batch_size).skip(start // batch_size)


def open_feed(
    folder: Path, manifest: Manifest, split: str, *, seed: int, config: TrainConfig, shuffle: bool
) -> MemoryFeed | StreamFeed:
    """The split in memory where it fits `train.cache_bytes`, else as a stream. Its shards are verified first.

    Raises:
        BadInput: Texts are to be bucketed and there are none, or they are not held in memory; shards are to be streamed from
            a bucket and are here.
        WorldFailure: A shard is missing or damaged, or the bucket cannot be read.
    """
    files = shard_files(folder, manifest, split)
    if (config.read_shards == "streamed") != is_remote(files[0]):
        raise BadInput(f"train.read_shards = {config.read_shards}: the shards of {folder} are {files[0]} and on")
    num_examples, num_bytes = manifest.splits[split].num_examples, manifest.splits[split].num_bytes
    if num_bytes <= config.cache_bytes:
        batch = _load(files, manifest, num_examples)
        lengths = _text_lengths(batch[0], manifest) if config.bucket_texts and shuffle else None
        return MemoryFeed(batch, seed, shuffle=shuffle, lengths=lengths, batch_size=config.global_batch_size)
    if config.bucket_texts:
        raise BadInput(
            f"train.bucket_texts = true: the {split} split has {num_bytes:,} bytes and is not held in memory"
            f" (train.cache_bytes = {config.cache_bytes:,})"
        )
    example_bytes = num_bytes / num_examples
    buffer = max(1, min(num_examples, int(config.shuffle_buffer_bytes / (example_bytes + 64)))) if shuffle else 0
    return StreamFeed(files, num_examples, parser(manifest), seed, buffer_examples=buffer)


def _text_lengths(features: dict[str, np.ndarray], manifest: Manifest) -> np.ndarray:
    """Words of each example's texts together [n] int32."""
    texts = [name for name, feature in manifest.features.items() if feature.kind == "text"]
    if not texts:
        raise BadInput("train.bucket_texts = true: the data holds no texts")
    return sum(np.array([len(text.split()) for text in features[name]], np.int32) for name in texts)


def load_split(folder: Path, manifest: Manifest, split: str) -> tuple[Any, ...]:
    """A whole split in the order it was written, as arrays: (features by name, labels) or (features, labels, weights)."""
    return _load(shard_paths(folder, manifest, split), manifest, manifest.splits[split].num_examples)


def _load(files: list[str], manifest: Manifest, num_examples: int) -> tuple[Any, ...]:
    import tensorflow as tf

    batches = _records(files).batch(1024).map(parser(manifest)).prefetch(1)
    whole = tf.nest.map_structure(
        lambda spec: np.empty((num_examples, *spec.shape[1:]), spec.dtype.as_numpy_dtype), batches.element_spec
    )
    done = 0
    for batch in batches.as_numpy_iterator():
        count = len(batch[1])
        for target, values in zip(tf.nest.flatten(whole), tf.nest.flatten(batch), strict=True):
            target[done : done + count] = values
        done += count
    assert done == num_examples, f"{files[0]} and on: {done} records, the manifest says {num_examples}"
    return whole


def _records(files: Any) -> Any:
    """Serialized records of one file or of several in a row."""
    import tensorflow as tf

    return tf.data.TFRecordDataset(files, buffer_size=_READ_BYTES)
