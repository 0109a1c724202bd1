"""What people bring → shards of raw records, statistics and a manifest, whole or not at all.

    manifest = prepare(DataConfig(name="digits"), seed=7, folder=Path("examples"), store=Path("prepared"))

1. Every part of the source is read once, by as many processes as there are processors; records go to disk sorted by key.
2. Then the sizes are known, and with them the number of shards; each shard takes its range of keys from all parts.
3. Statistics and manifest are written last, and the folder is renamed into its place.

What a part or a shard leaves is complete before it counts: a preparation that was killed goes on with what is missing. The
same source, configuration and seed give the same bytes on any machine, however many processes share the work.
"""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.atomic import aside
from trainer.config import DataConfig
from trainer.data.files import stage_files
from trainer.data.frames import read_frames
from trainer.data.manifest import (
    FILE_NAME,
    FORMAT_VERSION,
    Label,
    Manifest,
    Shard,
    Split,
    read_manifest,
    verify,
    write_manifest,
)
from trainer.data.parts import Plan, check_bad, merged_statistics
from trainer.data.records import decode
from trainer.data.shard_files import bring, link_file, locked
from trainer.data.shards import Layout, count_shards, find_leaks
from trainer.data.source import BadRecord, Source
from trainer.data.sources import open_source
from trainer.data.statistics import LONGEST_VALUE, Statistics, write_statistics
from trainer.data.window import days_of, settled
from trainer.data.workers import open_workers
from trainer.errors import BadInput, TriremeError, WorldFailure
from trainer.progress import progress, say
from trainer.storage import exists, is_remote, join, list_names, publish, stage

BAD_RECORDS_FILE = "bad_records.jsonl"
STATISTICS_PAGE = "statistics.html"

_WORTH_PROCESSES_BYTES = 64 * 1024**2  # below that, starting them takes longer than the work
_MOST_WORKERS = 8
_MOST_CLASSES = 20_000


def prepare(
    config: DataConfig,
    seed: int,
    folder: Path,
    store: str | Path | None = None,
    num_workers: int | None = None,
) -> Manifest:
    """Writes the dataset into `folder`, which must not exist or be empty.

    Args:
        config: The data section.
        seed: Seed of the permutation.
        folder: Where the shards and the manifest go; appears whole or not at all.
        store: Folder or `gs://` prefix of datasets prepared before. One that the same source, configuration and seed made
            is taken from there after its digests were checked; a new one is left there. In a folder of this machine, what
            a killed preparation had finished is left there too. None: nothing is reused.
        num_workers: Processes that share the work; 0: this one alone. None: as many as processors, where there is
            enough to do.

    Raises:
        BadInput: The dataset, a split or a feature does not exist or does not fit; a record is bad.
        WorldFailure: The dataset could not be fetched, a process was killed, or the bucket cannot be reached.
    """
    config = settled(config, datetime.now(UTC))  # once, so that a midnight in between changes nothing
    remote = store is not None and is_remote(store)
    kept_here = None if store is None or remote else Path(store)
    with stage_files(config, kept_here) as local:
        source = open_source(config, local)
        if kept_here is not None:
            kept, manifest = _kept(source, config, local, seed, kept_here, num_workers)
            _link_folder(kept, folder)
            return manifest
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=_made(folder.parent)) as aside_:
            if remote:
                return _kept_in_bucket(source, config, local, seed, str(store), folder, Path(aside_), num_workers)
            return _prepared(source, config, local, seed, folder, Path(aside_), num_workers)


def _kept(
    source: Source, config: DataConfig, local: Path | None, seed: int, store: Path, num_workers: int | None
) -> tuple[Path, Manifest]:
    """The dataset in a store on this machine, prepared there if it must be."""
    key = _key(source, config, seed)
    kept = store / key
    with locked(_made(store) / f".{key}.lock", "waiting for another run that prepares the same data"):
        work = store / f".{key}.work"
        if manifest := _whole(kept):
            shutil.rmtree(work, ignore_errors=True)  # of one that was killed when all was done
            say(f"reusing the prepared data {manifest.digest} ({_counts(manifest)})")
            return kept, manifest
        shutil.rmtree(kept, ignore_errors=True)  # damaged, or it would have been taken
        manifest = _prepared(source, config, local, seed, kept, _made(work), num_workers)
        shutil.rmtree(work, ignore_errors=True)
        return kept, manifest


def _kept_in_bucket(
    source: Source, config: DataConfig, local: Path | None, seed: int, store: str, folder: Path, aside_: Path,
    num_workers: int | None,
) -> Manifest:  # fmt: skip
    """The dataset in a bucket, brought here; or prepared here and published there."""
    uri = join(store, _key(source, config, seed))
    if exists(uri):
        manifest = read_manifest(stage(uri, aside_ / "manifest", [FILE_NAME]))
        staged = aside_ / "staged"
        bring(uri, staged, manifest, list_names(uri))
        if manifest := _whole(staged):
            say(f"reusing the prepared data {manifest.digest} ({_counts(manifest)}) from {uri}")
            _make_room(folder)
            staged.rename(folder)
            return manifest
        raise WorldFailure(f"{uri}: is damaged; remove it, and it is prepared anew")
    manifest = _prepared(source, config, local, seed, folder, aside_, num_workers)
    publish(folder, uri)
    say(f"kept for later runs in {uri}")
    return manifest


def _key(source: Source, config: DataConfig, seed: int) -> str:
    """Names a preparation by everything that its result depends on, and by nothing else."""
    settings = config.model_dump(mode="json", exclude={"data_dir", "download", "path", "window"})
    text = json.dumps([settings, source.identity(), seed, FORMAT_VERSION], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _prepared(
    source: Source, config: DataConfig, local: Path | None, seed: int, target: Path, work: Path, num_workers: int | None
) -> Manifest:
    """Prepares in the work folder and renames the result to its place."""
    folder = _made(work / "dataset")
    if num_workers is None:
        enough = sum(part.num_bytes for part in source.parts) >= _WORTH_PROCESSES_BYTES
        num_workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS) if enough else 0
    with open_workers(source, config, local, seed, work, folder, num_workers) as workers:
        summaries = _read_parts(workers, source, Plan.of(config, seed))
        layout = _layout(source, config, summaries)
        jobs = [
            {"layout": asdict(layout), "split": split, "shard": number}
            for split, count in layout.num_shards.items()
            for number in range(count)
        ]
        results = workers.run(jobs, lambda place, count: None)
        statistics = _counted(layout, summaries, work)  # while other processes write
        shards = _collect_shards(layout, jobs, results)
    manifest = _described(source, layout, statistics, shards)
    bad = [record for summary in summaries for record in summary["bad"]]
    if bad:
        say(f"left out {len(bad)} bad records, listed in {BAD_RECORDS_FILE}; the first: {BadRecord(*bad[0])}")
        lines = (json.dumps(BadRecord(*record)._asdict(), ensure_ascii=False) + "\n" for record in bad)
        (folder / BAD_RECORDS_FILE).write_text("".join(lines), encoding="utf-8")
    for pair, count in statistics.shared_examples.items():
        first, second = pair.split("/")
        say(f"warning: {count:,} examples of {second} are also in {first}: what is measured there is too good")
    manifest = manifest.model_copy(
        update={"num_skipped": len(bad), "statistics_sha256": write_statistics(folder, statistics)}
    )
    manifest = write_manifest(folder, manifest)
    _write_companions(folder, manifest, statistics)
    _make_room(target)
    folder.rename(target)
    say(f"prepared {manifest.digest} ({_counts(manifest)})")
    return manifest


def _read_parts(workers: Any, source: Source, plan: Plan) -> list[dict[str, Any]]:
    known = [part.num_examples for part in source.parts]
    by_example = None not in known
    sizes = known if by_example else [part.num_bytes for part in source.parts]
    summaries: list[Any] = [None] * len(sizes)
    read = [0] * len(sizes)
    with progress("prepare-data", total=sum(sizes), unit="example" if by_example else "byte") as bar:

        def advance(place: int, count: int) -> None:
            if by_example:
                read[place] = count
                bar.update(sum(read))

        for place, summary in workers.run([{"part": number} for number in range(len(sizes))], advance):
            summaries[place] = summary
            bad = [BadRecord(*record) for found in summaries if found for record in found["bad"]]
            check_bad(bad, plan)
            read[place] = sizes[place]
            bar.update(sum(read), f"{sum(found['num_examples'] for found in summaries if found):,} examples")
    return summaries


def _layout(source: Source, config: DataConfig, summaries: list[dict[str, Any]]) -> Layout:
    names = list(config.splits.named())
    num_examples, num_bytes = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for summary in summaries:
        for run in summary["runs"]:
            name = names[run["split"]]
            num_examples[name] += run["rows"][1] - run["rows"][0]
            num_bytes[name] += run["num_bytes"]
    window = config.window
    if window is not None and window.column is not None and not any(num_examples.values()):
        days = days_of(window, datetime.now(UTC))
        raise BadInput(
            f"data.window.column = {json.dumps(window.column)}: no row's day is from {days[0]} to {days[-1]}"
        )
    for name, count in num_examples.items():
        if count == 0:
            raise BadInput(f"data.splits.{name} = {json.dumps(config.splits.named()[name])}: holds no examples")
    class_names = source.class_names
    if class_names is None and source.is_classification:
        class_names = sorted({name for summary in summaries for name in summary["classes"]}, key=_class_order)
    _check_classes(class_names or [], config)
    num_shards = {
        name: count_shards(num_examples[name], num_bytes[name], config.shard_bytes, config.min_shards) for name in names
    }
    return Layout(names, len(summaries), source.label_name, class_names, num_shards)


def _check_classes(class_names: list[str], config: DataConfig) -> None:
    label = f"data.label_key = {json.dumps(config.label_key)}"
    if len(class_names) > _MOST_CLASSES:
        raise BadInput(
            f"{label}: has {len(class_names):,} different values, which is more than {_MOST_CLASSES:,} classes; if it is a"
            " number, set data.task to regression"
        )
    longest = max(class_names, key=len, default="")
    if len(longest) > LONGEST_VALUE:
        raise BadInput(
            f"{label}: {json.dumps(longest[:40], ensure_ascii=False)}… would be a class whose name has {len(longest):,}"
            f" characters; at most {LONGEST_VALUE} are allowed: is this the column of the texts?"
        )


def _collect_shards(layout: Layout, jobs: list[dict[str, Any]], results: Any) -> dict[str, list[Shard]]:
    found: dict[str, list[Any]] = {split: [None] * count for split, count in layout.num_shards.items()}
    with progress("prepare-data", total=len(jobs), unit="shard") as bar:
        for done, (place, result) in enumerate(results, 1):
            found[jobs[place]["split"]][jobs[place]["shard"]] = Shard(**result)
            bar.update(done)
    return found


def _counted(layout: Layout, summaries: list[dict[str, Any]], work: Path) -> Statistics:
    counted = {
        name: {key: found.result() for key, found in collectors.items()}
        for name, collectors in merged_statistics(work, layout.num_parts, layout.split_names).items()
    }
    return Statistics(splits=counted, shared_examples=find_leaks(layout, work, summaries))


def _described(source: Source, layout: Layout, statistics: Statistics, shards: dict[str, list[Shard]]) -> Manifest:
    splits = {}
    for name in layout.split_names:
        label = {value.value: value.count for value in statistics.splits[name][source.label_name].values}
        splits[name] = Split(
            num_examples=sum(shard.num_examples for shard in shards[name]),
            label_counts=[label.get(class_name, 0) for class_name in layout.class_names or []],
            shards=shards[name],
        )
    return Manifest(
        source=source.description(),
        features=source.features,
        label=Label(name=source.label_name, class_names=layout.class_names),
        weight=source.weight_name,
        splits=splits,
        statistics_sha256="",
    )


def _write_companions(folder: Path, manifest: Manifest, statistics: Statistics) -> None:
    """What is derived from the statistics: a schema to begin with, the standard protos, and the page for people."""
    from trainer.data.metadata_protos import write_protos
    from trainer.data.page import render_statistics
    from trainer.data.schema import SCHEMA_FILE, infer_schema

    schema = infer_schema(manifest, statistics)
    (folder / SCHEMA_FILE).write_text(schema.to_text(), encoding="utf-8")
    write_protos(folder, manifest, statistics, schema)
    page = render_statistics(manifest, statistics, sample(folder, manifest))
    (folder / STATISTICS_PAGE).write_text(page, encoding="utf-8")


def sample(folder: Path, manifest: Manifest, num_examples: int = 12) -> list[dict[str, Any]]:
    """The first few examples of the prepared train split, by feature."""
    shard = folder / manifest.splits["train"].shards[0].name
    return [decode(record, manifest.features) for record in islice(read_frames(shard), num_examples)]


def _class_order(name: str) -> tuple[float, str]:
    """Numbers by size, then words by their letters."""
    try:
        return float(name), name
    except ValueError:
        return float("inf"), name


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
            link_file(file, partial / file.name)


def _make_room(target: Path) -> None:
    _made(target.parent)
    if target.is_dir():
        target.rmdir()  # kfp makes no output folder, a person may have made an empty one


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _counts(manifest: Manifest) -> str:
    return ", ".join(f"{split.num_examples:,} {name}" for name, split in manifest.splits.items())
