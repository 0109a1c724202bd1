"""Examples of a TensorFlow Datasets builder → shards of raw records and a manifest, whole or not at all.

    manifest = prepare(DataConfig(name="digits"), seed=7, folder=Path("examples"), store=Path("prepared"))

Order: each record gets a key, a hash of seed, split and position in the source. The key chooses the shard and the place
within it, so that records are permuted over the whole split when they are written and a modest buffer mixes them when
they are read; nothing but one shard is ever held in memory, and every machine writes the same bytes.
"""

import contextlib
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
from trainer.data.manifest import ImageFeature, Manifest, Shard, Split, read_manifest, verify, write_manifest
from trainer.data.tfds_source import TfdsSource
from trainer.errors import BadInput, TriremeError
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
    splits = {}
    for name, expression in source.splits.items():
        splits[name] = _write_split(source, name, expression, seed, folder)
        if splits[name].num_examples == 0:
            raise BadInput(f"data.splits.{name} = {json.dumps(expression)}: holds no examples")
    manifest = Manifest(
        source=source.identity_fields(),
        image=ImageFeature(shape=source.image_shape),
        class_names=source.class_names,
        splits=splits,
    )
    return write_manifest(folder, manifest)


def _write_split(source: TfdsSource, name: str, expression: str, seed: int, folder: Path) -> Split:
    expected = source.num_examples(expression)
    num_shards = max(1, math.ceil((expected or 0) * (math.prod(source.image_shape) + 64) / _SHARD_BYTES))
    label_counts = np.zeros(len(source.class_names), np.int64)
    count, shards = 0, []
    with contextlib.ExitStack() as opened:
        names = [folder / f".{name}-{shard}.spill" for shard in range(num_shards)]
        spill = [opened.enter_context(file.open("wb+")) for file in names]
        with progress("prepare-data", total=expected or 0, unit=f"{name} example") as bar:
            for index, (image, label) in enumerate(source.examples(expression)):
                key = _record_key(seed, name, index)
                record = _serialize(image, label)
                stream = spill[key * num_shards >> 64]
                stream.write(_SPILL_HEADER.pack(key, len(record)))
                stream.write(record)
                label_counts[label] += 1
                count = index + 1
                if count % 256 == 0:
                    bar.update(count)
            bar.update(count)
        for shard, stream in enumerate(spill):
            shards.append(_finish_shard(stream, folder / f"{name}-{shard:05d}-of-{num_shards:05d}.tfrecord"))
            names[shard].unlink()
    return Split(num_examples=count, label_counts=label_counts.tolist(), shards=shards)


def _record_key(seed: int, split: str, index: int) -> int:
    """64 bits that are the same on every machine and in every version of every library."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{split}/{index}".encode(), digest_size=8).digest(), "little")


def _serialize(image: np.ndarray, label: int) -> bytes:
    import tensorflow as tf

    example = tf.train.Example()
    example.features.feature["image"].bytes_list.value.append(image.tobytes())
    example.features.feature["label"].int64_list.value.append(label)
    return example.SerializeToString(deterministic=True)  # without it, bytes differ from process to process


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
