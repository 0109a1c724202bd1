"""Examples of a TensorFlow Datasets builder → shards of raw records and a manifest, whole or not at all.

    manifest = prepare(DataConfig(name="digits"), seed=7, folder=Path("examples"), store=Path("prepared"))

Order: each record gets a key, a hash of seed, split and position in the source. The key chooses the shard and the place
within it, so that records are permuted over the whole split when they are written and a modest buffer mixes them when
they are read; nothing but one shard is ever held in memory, and every machine writes the same bytes.
"""

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.atomic import aside
from trainer.config import DataConfig
from trainer.data.manifest import Label, Manifest, Shard, Split, read_manifest, verify, write_manifest
from trainer.data.records import Encoder, finish, label_entry
from trainer.data.statistics import Collector, Statistics, collectors, write_statistics
from trainer.data.tfds_source import TfdsSource
from trainer.errors import TriremeError
from trainer.progress import progress, say

_SHARD_BYTES = 64 * 1024**2
_SPILL_HEADER = struct.Struct("<QI")


def prepare(config: DataConfig, seed: int, folder: Path, store: Path | None = None) -> Manifest:
    """Writes the dataset into `folder`, which must not exist or be empty.

    Args:
        config: The data section.
        seed: Seed of the permutation.
        folder: Where the shards and the manifest go; appears whole or not at all.
        store: Folder of datasets prepared before. One that the same source, configuration and seed made is taken from
            there after its digests were checked; a new one is left there. None: nothing is reused.

    Raises:
        BadInput: The dataset, a split or a feature does not exist or does not fit.
        WorldFailure: The dataset could not be fetched.
    """
    source = TfdsSource(config)
    key = hashlib.sha256(
        json.dumps(
            [config.to_json(), source.identity(), seed, Manifest.model_fields["format_version"].default]
        ).encode()
    ).hexdigest()[:32]
    kept = store / key if store else None
    if kept and (manifest := _whole(kept)):
        _link_folder(kept, folder)
        say(f"reusing the prepared data {manifest.digest} ({_counts(manifest)})")
        return manifest
    with aside(folder) as partial:
        manifest = _write(source, seed, partial)
    say(f"prepared {manifest.digest} ({_counts(manifest)})")
    if kept:
        try:
            shutil.rmtree(kept, ignore_errors=True)  # what stands there is damaged, or it would have been taken
            _link_folder(folder, kept)
        except OSError as error:  # the store saves time; without it the run is just as right
            say(f"the prepared data could not be kept for later runs in {kept}: {error.strerror}")
    return manifest


def _write(source: TfdsSource, seed: int, folder: Path) -> Manifest:
    splits, counted = {}, {}
    for name in source.splits:
        splits[name], counted[name] = _write_split(source, name, seed, folder)
    weight = "weight" if source._weight_path else None
    manifest = Manifest(
        source=source.description(),
        features=source.features,
        label=Label(name=source.label_name, class_names=source.class_names),
        weight=weight,
        splits=splits,
        statistics_sha256=write_statistics(folder, Statistics(splits=counted)),
    )
    return write_manifest(folder, manifest)


def _write_split(source: TfdsSource, name: str, seed: int, folder: Path) -> tuple[Split, dict]:
    parts = [part for part in source.parts if part.split == name]
    expected = sum(part.num_examples or 0 for part in parts)
    encode = Encoder(source.features)
    counters = collectors(source.features)
    counters[source.label_name] = Collector("category" if source.is_classification else "number")
    num_shards = max(1, math.ceil(expected * 3200 / _SHARD_BYTES))
    classes = {class_name: index for index, class_name in enumerate(source.class_names or [])}
    label_counts = np.zeros(len(classes), np.int64)
    spill = [(folder / f".{name}-{shard}.spill").open("wb+") for shard in range(num_shards)]
    count = 0
    with progress("prepare-data", total=expected, unit=f"{name} example") as bar:
        for part in parts:
            for chunk in source.read(part):
                for feature, values in chunk.columns.items():
                    counters[feature].add(values)
                counters[source.label_name].add(chunk.labels)
                for row, label in enumerate(chunk.labels):
                    key = _record_key(seed, name, count)
                    count += 1
                    values = {feature: column[row] for feature, column in chunk.columns.items()}
                    if classes:
                        label = classes[label]
                        label_counts[label] += 1
                    record = finish(encode(values), label_entry(source.label_name, label))
                    stream = spill[key * num_shards >> 64]
                    stream.write(_SPILL_HEADER.pack(key, len(record)))
                    stream.write(record)
                bar.update(count)
    shards = []
    for shard, stream in enumerate(spill):
        path = folder / f"{name}-{shard:05d}-of-{num_shards:05d}.tfrecord"
        shards.append(_finish_shard(stream, path))
        stream.close()
        Path(stream.name).unlink()
    counted = {feature: counter.result() for feature, counter in counters.items()}
    return Split(num_examples=count, label_counts=label_counts.tolist(), shards=shards), counted


def _record_key(seed: int, split: str, index: int) -> int:
    """64 bits that are the same on every machine and in every version of every library."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{split}/{index}".encode(), digest_size=8).digest(), "little")


def _finish_shard(stream: Any, path: Path) -> Shard:
    """The spilled records in the order of their keys, as a TFRecord file."""
    import tensorflow as tf

    records = sorted(_spilled(stream))
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _, record in records:
            writer.write(record)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Shard(name=path.name, num_examples=len(records), num_bytes=path.stat().st_size, sha256=digest)


def _spilled(stream: Any) -> Iterator[tuple[int, bytes]]:
    stream.seek(0)
    while header := stream.read(_SPILL_HEADER.size):
        key, length = _SPILL_HEADER.unpack(header)
        yield key, stream.read(length)


def _whole(folder: Path) -> Manifest | None:
    """The manifest of a folder whose every file is as it was written; otherwise None."""
    if not folder.is_dir():
        return None
    try:
        manifest = read_manifest(folder)
        verify(folder, manifest)
    except TriremeError as error:
        say(f"not reusing prepared data: {error}")
        return None
    return manifest


def _link_folder(source: Path, target: Path) -> None:
    """`target` becomes a copy of `source` that shares its files where the file system allows it."""
    with aside(target) as partial:
        for file in source.iterdir():
            try:
                os.link(file, partial / file.name)
            except OSError:
                shutil.copy2(file, partial / file.name)


def _counts(manifest: Manifest) -> str:
    return ", ".join(f"{split.num_examples:,} {name}" for name, split in manifest.splits.items())
