"""First half of preparing: one part of the source → records sorted by key, on disk, with everything counted on the way.

    summary = write_part(source, number, plan, folder)       # part-00003.json says that part 3 is finished

A record's key is a well mixed number made from seed, part and position. All records of a split in the order of their keys
are its permutation; a shard is a range of keys. Runs of a few megabytes are sorted in memory, so memory stays flat, and a
shard takes one contiguous piece of each run.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from trainer.config import DataConfig
from trainer.data.frames import write_all
from trainer.data.records import Encoder
from trainer.data.source import BadRecord, Chunk, Source
from trainer.data.splitting import Splitter, mixed
from trainer.data.statistics import Collector, hash64, picked
from trainer.errors import BadInput

_RUN_BYTES = 16 * 1024**2
_SHORT_RECORD = 256


@dataclass(frozen=True)
class Plan:
    """What a process needs to know besides the source."""

    seed: int
    """Seed of the permutation."""
    split_names: list[str]
    """Every split, in order."""
    shares: dict[str, int]
    """Percent by split, where the source itself has no splits."""
    skip_bad: bool
    """Leave bad records out."""
    max_bad: int
    """Most of them that are left out."""

    @classmethod
    def of(cls, config: DataConfig, seed: int) -> "Plan":
        """The plan of a data section."""
        return cls(
            seed,
            list(config.splits.named()),
            config.splits.shares() if config.source != "tfds" else {},
            config.on_bad_record == "skip",
            config.max_bad_records,
        )


def write_part(
    source: Source, number: int, plan: Plan, folder: Path, advance: Callable[[int], None] = lambda count: None
) -> dict[str, Any]:
    """Reads one part and leaves `part-<number>.records`, `.keys.npy`, `.lengths.npy`, `.labels.npy`, `.hashes.npy`,
    `.statistics.json` and, last, `.json`; what an earlier try finished is taken as it is.

    Args:
        source: The source.
        number: Which part.
        plan: Seed and splits.
        folder: Where the files go.
        advance: Called with the examples read so far.

    Returns:
        What the JSON file holds: runs, class names met, bad records.

    Raises:
        BadInput: A bad record, where none is allowed, or one too many.
    """
    done = folder / f"part-{number:05d}.json"
    if (earlier := _finished(done)) is not None:
        return earlier
    part = source.parts[number]
    counters = {name: _counters(source) for name in plan.split_names}
    classes: dict[str, int] = {}
    encode = Encoder(source.features, source.weight_name)
    bad: list[BadRecord] = []
    keys = _keys(plan.seed, number)
    assign = _assigner(plan, part.split)
    position = 0
    with contextlib.closing(_RunWriter(folder, number)) as writer:
        for chunk in source.read(part):
            bad += chunk.bad
            check_bad(bad, plan)
            count = len(chunk.labels)
            if not count:
                continue
            splits = assign(position, count, chunk)
            _count(counters, plan.split_names, splits, chunk, source)
            if source.is_classification:
                labels = [classes.setdefault(label, len(classes)) for label in chunk.labels]
            else:
                labels = chunk.labels
            columns = (
                chunk.columns if source.weight_name is None else chunk.columns | {source.weight_name: chunk.weights}
            )
            writer.add(encode.encode_all(columns), keys(position, count), splits, labels)
            position += count
            advance(position)
        runs = writer.finish()
    summary = {
        "num_examples": position,
        "runs": runs,
        "classes": list(classes),
        "bad": [list(record) for record in bad],
    }
    counted = {split: {name: one.to_json() for name, one in found.items()} for split, found in counters.items()}
    _statistics_file(folder, number).write_text(json.dumps(counted), encoding="utf-8")
    # Nothing here waits for the disk: a part that a crash of the machine damaged is read again.
    partial = done.with_suffix(".partial")
    files = sorted(file for file in folder.glob(f"part-{number:05d}.*") if file not in (done, partial))
    summary["checksums"] = {file.name: _checksum(file) for file in files if file != writer.path}
    summary["checksums"][writer.path.name] = writer.crc
    partial.write_text(json.dumps(summary), encoding="utf-8")
    partial.rename(done)
    return summary


def check_bad(bad: list[BadRecord], plan: Plan) -> None:
    """Ends the preparation where more bad records were met than are allowed.

    Raises:
        BadInput: Names the file, the row and what is wrong.
    """
    if not bad:
        return
    if not plan.skip_bad:
        raise BadInput(f"{bad[0]} (data.on_bad_record = skip leaves such records out)")
    if len(bad) > plan.max_bad:
        raise BadInput(
            f"data.max_bad_records = {plan.max_bad}: there are more bad records than that; the last was {bad[-1]}"
        )


def _finished(done: Path) -> dict[str, Any] | None:
    """What an earlier try left of a part, if every file is as it was written."""
    try:
        summary = json.loads(done.read_text(encoding="utf-8"))
        whole = all(_checksum(done.parent / name) == known for name, known in summary["checksums"].items())
    except (OSError, ValueError, KeyError):
        return None
    return summary if whole else None


def _checksum(file: Path) -> int:
    """CRC-32C of a file, which costs a tenth of waiting for the disk."""
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(1024**2):
            crc = google_crc32c.extend(crc, block)
    return crc


class _RunWriter:
    """Collects records and writes them out in sorted runs.

    Attributes:
        path: The file of the records.
        crc: CRC-32C of what was written there.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._stem = folder / f"part-{number:05d}"
        self.path, self.crc = self._stem.with_suffix(".records"), 0
        self._file = self.path.open("wb", buffering=0)
        self._runs: list[dict[str, Any]] = []
        self._columns: list[list[np.ndarray]] = [[], [], [], []]  # keys, lengths, labels, hashes
        self._offset = self._rows = 0
        self._clear()

    def _clear(self) -> None:
        self._bodies: list[bytes | memoryview] = []
        self._keys: list[np.ndarray] = []
        self._splits: list[np.ndarray] = []
        self._labels: list[float] = []
        self._size = 0

    def add(
        self, bodies: Sequence[bytes | memoryview], keys: np.ndarray, splits: np.ndarray, labels: Sequence[float]
    ) -> None:
        self._bodies += bodies
        self._keys.append(keys)
        self._splits.append(splits)
        self._labels += labels
        self._size += sum(map(len, bodies))
        if self._size >= _RUN_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._bodies:
            return
        keys, splits = np.concatenate(self._keys), np.concatenate(self._splits)
        order = np.lexsort((keys, splits))
        bodies = [self._bodies[place] for place in order.tolist()]
        lengths = np.array([len(body) for body in bodies], np.uint32)
        block = b"".join(bodies)
        write_all(self._file, block)
        self.crc = google_crc32c.extend(self.crc, block)
        ends = np.cumsum(lengths, dtype=np.int64)
        hashes = _content_hashes(block, ends.tolist())
        columns = (keys[order], lengths, np.array(self._labels, np.float64)[order], hashes)
        for kept, new in zip(self._columns, columns, strict=True):
            kept.append(new)
        ends = np.concatenate([[0], ends])
        edges = np.searchsorted(splits[order], np.arange(256))
        for split in np.unique(splits).tolist():
            first, last = int(edges[split]), int(edges[split + 1])
            self._runs.append(
                {
                    "split": split,
                    "rows": [self._rows + first, self._rows + last],
                    "offset": self._offset + int(ends[first]),
                    "num_bytes": int(ends[last] - ends[first]),
                }
            )
        self._offset += int(ends[-1])
        self._rows += len(bodies)
        self._clear()

    def close(self) -> None:
        self._file.close()

    def finish(self) -> list[dict[str, Any]]:
        self._flush()
        types = (np.uint64, np.uint32, np.float64, np.uint64)
        for name, column, kind in zip(("keys", "lengths", "labels", "hashes"), self._columns, types, strict=True):
            whole = np.concatenate([np.empty(0, kind), *column]).astype(kind)
            np.save(self._stem.with_suffix(f".{name}.npy"), whole, allow_pickle=False)
        return self._runs


def _keys(seed: int, number: int) -> Callable[[int, int], np.ndarray]:
    base = np.uint64(hash64(f"{seed}/{number}"))

    def keys(start: int, count: int) -> np.ndarray:
        with np.errstate(over="ignore"):
            return mixed(base ^ mixed(np.arange(start, start + count, dtype=np.uint64)))

    return keys


def _assigner(plan: Plan, split: str | None) -> Callable[[int, int, Chunk], np.ndarray]:
    if split is not None:
        place = plan.split_names.index(split)
        return lambda start, count, chunk: np.full(count, place, np.uint8)
    splitter = Splitter({name: plan.shares[name] for name in plan.split_names})

    def assign(start: int, count: int, chunk: Chunk) -> np.ndarray:
        return splitter.by_position(start, count) if chunk.keys is None else splitter.by_key(chunk.keys)

    return assign


def _counters(source: Source) -> dict[str, Collector]:
    found = {name: Collector(feature.kind) for name, feature in source.features.items()}
    found[source.label_name] = Collector("category" if source.is_classification else "number")
    return found


def _count(
    counters: dict[str, dict[str, Collector]], names: list[str], splits: np.ndarray, chunk: Chunk, source: Source
) -> None:
    present = np.unique(splits).tolist()
    for split in present:
        rows = None if len(present) == 1 else np.flatnonzero(splits == split)
        found = counters[names[split]]
        for name, values in chunk.columns.items():
            found[name].add(values, rows)
            if (sizes := chunk.image_sizes.get(name)) is not None:
                found[name].count_sizes(sizes if rows is None else picked(sizes, rows))
        found[source.label_name].add(chunk.labels, rows)


def _content_hashes(block: bytes, ends: list[int]) -> np.ndarray:
    """64 bits of each record's features, to find the same example again. Long ones by two checksums, which are ten
    times quicker than a hash and good enough between records that were not made to collide."""
    value = google_crc32c.value
    found, start = [], 0
    for end in ends:
        if end - start < _SHORT_RECORD:
            found.append(int.from_bytes(hashlib.blake2b(block[start:end], digest_size=8).digest(), "little"))
        else:
            middle = start + (end - start) // 2
            found.append(value(block[start:middle]) << 32 | value(block[middle:end]))
        start = end
    return np.array(found, np.uint64)


def merged_statistics(folder: Path, num_parts: int, split_names: list[str]) -> dict[str, dict[str, Collector]]:
    """The collectors by split and feature over all parts, in their order, of which one at a time is in memory."""
    whole: dict[str, dict[str, Collector]] = {split: {} for split in split_names}
    for number in range(num_parts):
        counted = json.loads(_statistics_file(folder, number).read_text(encoding="utf-8"))
        for split, by_name in counted.items():
            for name, state in by_name.items():
                found = Collector.from_json(state)
                if name in whole[split]:
                    whole[split][name].merge(found)
                else:
                    whole[split][name] = found
    return whole


def _statistics_file(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.statistics.json"
