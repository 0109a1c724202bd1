"""Second half of preparing: the records of all parts that fall into one range of keys → one TFRecord file.

shard = write_shard(layout, "train", 3, work, folder)     # taken as it is where an earlier try finished it
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import SHARDS_FOR_MOST
from trainer.data.frames import FrameWriter
from trainer.data.manifest import Shard
from trainer.data.records import finish, label_entry

_LEAK_PASS = 20_000_000  # content hashes that are compared at a time
_RECORD_OVERHEAD = 64  # frame and label, about
_SMALL_SHARD_BYTES = 4 * 1024**2


@dataclass(frozen=True)
class Layout:
    """How records become files."""

    split_names: list[str]
    """Every split, in order."""
    num_parts: int
    """Parts of the source."""
    label_name: str
    """Name of the label."""
    class_names: list[str] | None
    """The classes; None where the label is a number."""
    num_shards: dict[str, int]
    """Files by split."""

    def shard_name(self, split: str, number: int) -> str:
        """File name of a shard."""
        return f"{split}-{number:05d}-of-{self.num_shards[split]:05d}.tfrecord"


def count_shards(num_examples: int, num_bytes: int, shard_bytes: int, min_shards: int | None) -> int:
    """As many files as the size asks for, at least `min_shards`, and never more than examples.

    Without `min_shards`: at least so many as share the reading of most groups of workers, where none becomes tiny.
    """
    total = num_bytes + _RECORD_OVERHEAD * num_examples
    if min_shards is None:
        min_shards = min(SHARDS_FOR_MOST, total // _SMALL_SHARD_BYTES)
    return max(1, min(max(math.ceil(total / shard_bytes), min_shards), num_examples))


def write_shard(layout: Layout, split: str, number: int, work: Path, folder: Path) -> Shard:
    """Writes one shard with its record beside it in `work`, or takes the one that an earlier try finished.

    Args:
        layout: Splits, classes and numbers of files.
        split: The split.
        number: Which of its shards, from 0.
        work: Folder of the parts.
        folder: Where the shard goes.
    """
    path = folder / layout.shard_name(split, number)
    done = work / f"{path.name}.json"
    if done.is_file() and path.is_file():
        shard = Shard(**json.loads(done.read_text(encoding="utf-8")))
        if path.stat().st_size == shard.num_bytes:
            return shard
    keys, bodies, labels = _gather(layout, split, number, work)
    entry = label_entry if layout.class_names is None else functools.cache(label_entry)
    with FrameWriter(path) as writer:
        for place in np.argsort(keys, kind="stable").tolist():
            writer.write(finish(bodies[place], entry(layout.label_name, labels[place])))
    shard = Shard(name=path.name, num_examples=len(bodies), num_bytes=writer.num_bytes, sha256=writer.sha256)
    partial = done.with_suffix(".partial")
    partial.write_text(shard.to_json(), encoding="utf-8")
    partial.rename(done)
    return shard


def _gather(
    layout: Layout, split: str, number: int, work: Path
) -> tuple[np.ndarray, list[memoryview], list[int | float]]:
    """Keys, records and labels of one range of keys, in the order of parts and runs."""
    count, place = layout.num_shards[split], layout.split_names.index(split)
    low, high = -(-(number << 64) // count), -(-((number + 1) << 64) // count)  # rounded up: key·count >> 64 == number
    all_keys, labels = [np.empty(0, np.uint64)], []
    bodies: list[memoryview] = []
    for part in range(layout.num_parts):
        stem = work / f"part-{part:05d}"
        summary = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
        runs = [run for run in summary["runs"] if run["split"] == place]
        if not runs:
            continue
        classes = _class_places(layout.class_names, summary["classes"])
        keys, lengths, own = (
            np.load(stem.with_suffix(f".{name}.npy"), mmap_mode="r", allow_pickle=False)
            for name in ("keys", "lengths", "labels")
        )
        with stem.with_suffix(".records").open("rb") as file:
            for run in runs:
                first, last = run["rows"]
                run_keys = keys[first:last]
                start = _first_at_least(run_keys, low)
                end = _first_at_least(run_keys, high)
                if start == end:
                    continue
                sizes = np.asarray(lengths[first:last], np.int64)
                file.seek(run["offset"] + int(sizes[:start].sum()))
                block = file.read(int(sizes[start:end].sum()))
                bodies += _cut(block, sizes[start:end])
                all_keys.append(np.asarray(run_keys[start:end]))
                run_labels = np.asarray(own[first + start : first + end])
                labels += (run_labels if classes is None else classes[run_labels.astype(np.int64)]).tolist()
    return np.concatenate(all_keys), bodies, labels


def _first_at_least(keys: np.ndarray, bound: int) -> int:
    return len(keys) if bound >> 64 else int(np.searchsorted(keys, np.uint64(bound)))


def _class_places(class_names: list[str] | None, met: list[str]) -> np.ndarray | None:
    """Index of each class in the order in which a part met them."""
    if class_names is None:
        return None
    places = {name: place for place, name in enumerate(class_names)}
    return np.array([places[name] for name in met], np.int64)


def _cut(data: bytes, sizes: np.ndarray) -> Iterator[memoryview]:
    ends, block = np.cumsum(sizes).tolist(), memoryview(data)
    starts = [0, *ends[:-1]]
    return (block[start:end] for start, end in zip(starts, ends, strict=True))


def find_leaks(layout: Layout, work: Path, summaries: list[dict[str, Any]]) -> dict[str, int]:
    """Examples of one split whose features are also in another: `train/test` → how many of the second.

    Memory does not grow with the data: hashes are compared a slice of their range at a time.
    """
    total = sum(summary["num_examples"] for summary in summaries)
    passes = max(1, math.ceil(total / _LEAK_PASS))
    leaks: dict[str, int] = {}
    for number in range(passes):
        found: list[list[np.ndarray]] = [[] for _ in layout.split_names]
        for part, summary in enumerate(summaries):
            hashes = np.load(work / f"part-{part:05d}.hashes.npy", mmap_mode="r", allow_pickle=False)
            for run in summary["runs"]:
                some = np.asarray(hashes[slice(*run["rows"])])
                found[run["split"]].append(some[some % np.uint64(passes) == number] if passes > 1 else some)
        sets = [np.concatenate([np.empty(0, np.uint64), *some]) for some in found]
        for first, name in enumerate(layout.split_names):
            for second in range(first + 1, len(sets)):
                shared = int(np.isin(sets[second], sets[first]).sum())
                if shared:
                    pair = f"{name}/{layout.split_names[second]}"
                    leaks[pair] = leaks.get(pair, 0) + shared
    return leaks
