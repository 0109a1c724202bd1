"""Scores files with an exported model, batch by batch, through the signature that serves.

    count = predict("output/models/digits/1", Path("scans"), Path("scores.jsonl"))

What a client would send is read as it would send it: image files as bytes, tables by column, texts by line; a prepared
split as it is. Only one batch is in memory, and the output appears whole or not at all.
"""

import csv
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer import storage
from trainer.errors import BadInput
from trainer.export import SAVED_MODEL, read_metadata
from trainer.progress import say

_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")  # asked for; not all can be decoded


class _Row(NamedTuple):
    """One example."""

    name: str
    """File, line or number: what a person finds it again by."""
    values: dict[str, Any]
    """By feature."""


def predict(model: str, source: Path, output: Path, *, split: str = "test", batch_size: int = 64) -> int:
    """Scores every example and returns how many there were.

    Args:
        model: Folder or `gs://` prefix of a SavedModel (a registry's version), or a trained model's folder.
        source: An image, a folder of images, a `.csv`, `.jsonl` or `.txt` file, or a prepared dataset's folder.
        output: A `.jsonl` file (with all probabilities) or a `.csv` file (with the highest).
        split: Of a prepared dataset.
        batch_size: Examples of one call.

    Raises:
        BadInput: The model, the source or a value in it cannot be used; the message says where it stands.
    """
    if output.suffix not in (".jsonl", ".csv"):
        raise BadInput(f"--output = {output}: must end in .jsonl or .csv")
    if not source.exists():
        raise BadInput(f"{source}: there is no such file or folder")
    with tempfile.TemporaryDirectory() as staged:
        folder = _saved_model(model, Path(staged))
        metadata = read_metadata(folder)
        if metadata is None:
            raise BadInput(f"{model}: is no SavedModel that was exported here (it has no metadata inside)")
        signature, rows = _rows(source, metadata, split)
        return _score(folder, metadata, signature, _readable(rows, source), output, batch_size)


def _saved_model(model: str, staged: Path) -> Path:
    folder = storage.stage(model, staged / "model") if storage.is_remote(model) else Path(model)
    for candidate in (folder, folder / SAVED_MODEL):
        if (candidate / "saved_model.pb").is_file():
            return candidate
    raise BadInput(f"{model}: holds no saved_model.pb")


def _readable(rows: Iterator[_Row], source: Path) -> Iterator[_Row]:
    """The examples; a file of theirs that cannot be read, and a source without any, is bad input."""
    try:
        first = next(rows, None)
        if first is None:
            raise BadInput(f"{source}: holds no examples")
        yield first
        yield from rows
    except OSError as error:
        raise BadInput(f"{error.filename or source}: cannot be read: {error.strerror}") from None


def _score(
    folder: Path, metadata: dict[str, Any], signature: str, rows: Iterable[_Row], output: Path, batch_size: int
) -> int:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(folder))
    serve = loaded.signatures[signature]
    specs = serve.structured_input_signature[1]
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    count = bad = 0
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8", newline="") as file:
            write = _writer(file, output.suffix, metadata)
            remaining = iter(rows)
            while batch := list(islice(remaining, batch_size)):
                inputs = {
                    name: tf.constant([row.values[name] for row in batch], spec.dtype) for name, spec in specs.items()
                }
                answers = {name: values.numpy() for name, values in serve(**inputs).items()}
                for place, row in enumerate(batch):
                    bad += not write(row.name, {name: values[place] for name, values in answers.items()})
                count += len(batch)
        partial.replace(output)
    except OSError as error:
        raise BadInput(f"--output = {output}: cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    say(
        f"{count:,} example{'' if count == 1 else 's'} scored into {output}"
        + (f"; {bad:,} could not be decoded" if bad else "")
    )
    return count


def _writer(file: Any, suffix: str, metadata: dict[str, Any]) -> Any:
    """A function that writes one answer and tells whether the example was understood."""
    is_class = metadata["task"] == "classification"
    table = csv.writer(file)
    if suffix == ".csv":
        table.writerow(["example", "ok", *(("class_name", "probability") if is_class else ("prediction",))])

    def write(name: str, answer: dict[str, Any]) -> bool:
        ok = bool(answer.get("ok", True))
        told: dict[str, Any] = {"example": name, "ok": ok}
        if is_class:
            told["class_name"] = answer["class_name"].decode() if ok else None
            told["probability"] = _number(answer["probabilities"].max()) if ok else None
            if suffix == ".jsonl":
                told["probabilities"] = [_number(value) for value in answer["probabilities"]] if ok else None
        else:
            told["prediction"] = _number(answer["prediction"]) if ok else None
        if suffix == ".csv":
            table.writerow(["" if value is None else value for value in told.values()])
        else:
            file.write(json.dumps(told, ensure_ascii=False) + "\n")
        return ok

    return write


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _rows(source: Path, metadata: dict[str, Any], split: str) -> tuple[str, Iterator[_Row]]:
    """The signature that takes this kind of source, and its examples."""
    features = metadata["features"]
    images = [name for name, feature in features.items() if feature["kind"] == "image"]
    if (source / "manifest.json").is_file():
        return "serving_default", _prepared(source, features, split)
    if images and "image_bytes" not in metadata["signatures"]:
        raise BadInput(f"{source}: the model takes images that no file holds (channels); give a prepared dataset")
    if source.is_dir() or source.suffix.lower() in _IMAGES:
        if len(features) != 1 or not images:
            raise BadInput(
                f"{source}: the model takes {', '.join(features)}, not one image; give a .csv or .jsonl file"
            )
        return "image_bytes", _image_files(source, images[0])
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".txt": _text_lines}
    if source.suffix not in readers or not source.is_file():
        raise BadInput(f"{source}: must be an image, a folder, a prepared dataset, or a .csv, .jsonl or .txt file")
    signature = "image_bytes" if images else "serving_default"
    return signature, readers[source.suffix](source, features)


def _prepared(folder: Path, features: dict[str, Any], split: str) -> Iterator[_Row]:
    import tensorflow as tf

    from trainer.data.manifest import read_manifest, verify
    from trainer.data.records import parser

    manifest = read_manifest(folder)
    if split not in manifest.splits:
        raise BadInput(f"--split = {split}: {folder} has {', '.join(manifest.splits)}")
    if missing := [name for name in features if name not in manifest.features]:
        raise BadInput(f"{folder}: has no {', '.join(missing)}, which the model takes")
    verify(folder, manifest, [split])
    files = [str(folder / shard.name) for shard in manifest.splits[split].shards]
    count = 0
    for batch in tf.data.TFRecordDataset(files).batch(256).map(parser(manifest)).as_numpy_iterator():
        for place in range(len(batch[1])):
            yield _Row(f"{split}:{count}", {name: batch[0][name][place] for name in features})
            count += 1


def _image_files(source: Path, name: str) -> Iterator[_Row]:
    files = [source]
    if source.is_dir():
        # Whatever is there is answered, if only as not ok: nobody should count files to see that one is missing.
        files = sorted(file for file in source.rglob("*") if file.is_file() and not _hidden(file, source))
        if not files:
            raise BadInput(f"{source}: holds no files")
    for file in files:
        yield _Row(str(file.relative_to(source)) if source.is_dir() else str(file), {name: file.read_bytes()})


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _csv_rows(file: Path, features: dict[str, Any]) -> Iterator[_Row]:
    from trainer.data.source import plain_names

    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = next(reader, [])
            names = list(plain_names(header, str(file)).values())
            _check_columns(str(file), names, features)
            for values in reader:
                if len(values) != len(header):
                    raise BadInput(f"{file}:{reader.line_num}: has {len(values)} values, the header has {len(header)}")
                given = dict(zip(names, values, strict=True))
                yield _Row(str(reader.line_num), _converted(given, features, file, reader.line_num))
        except csv.Error as error:
            raise BadInput(f"{file}:{reader.line_num}: {error}") from None
        except UnicodeDecodeError:
            raise BadInput(f"{file}: is not UTF-8") from None


def _jsonl_rows(file: Path, features: dict[str, Any]) -> Iterator[_Row]:
    for number, line in _lines(file):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{file}:{number}: is not JSON ({error.msg})") from None
        if not isinstance(given, dict):
            raise BadInput(f"{file}:{number}: must be an object")
        _check_columns(f"{file}:{number}", list(given), features)
        yield _Row(str(number), _converted(given, features, file, number))


def _text_lines(file: Path, features: dict[str, Any]) -> Iterator[_Row]:
    if len(features) != 1 or next(iter(features.values()))["kind"] not in ("text", "category"):
        raise BadInput(f"{file}: the model takes {', '.join(features)}, not one text; give a .csv or .jsonl file")
    for number, line in _lines(file):
        yield _Row(str(number), {next(iter(features)): line})


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8-sig") as stream:
        try:
            for number, line in enumerate(stream, 1):
                yield number, line.rstrip("\n")
        except UnicodeDecodeError:
            raise BadInput(f"{file}: is not UTF-8") from None


def _check_columns(where: str, names: list[str], features: dict[str, Any]) -> None:
    if missing := [name for name in features if name not in names]:
        raise BadInput(f"{where}: has no {', '.join(missing)}, which the model takes")


def _converted(given: dict[str, Any], features: dict[str, Any], file: Path, line: int) -> dict[str, Any]:
    """Values as the signature takes them: numbers missing are NaN, texts missing are empty, images are files."""
    values: dict[str, Any] = {}
    for name, feature in features.items():
        value = given[name]
        if feature["kind"] == "image":
            try:
                values[name] = (file.parent / str(value)).read_bytes()
            except OSError as error:
                raise BadInput(f"{file}:{line}: {name} = {value!r}: {error.strerror}") from None
        elif feature["kind"] == "number":
            values[name] = _as_number(value, tuple(feature["shape"]), f"{file}:{line}: {name}")
        else:
            values[name] = "" if value is None else str(value)
    return values


def _as_number(value: Any, shape: tuple[int, ...], where: str) -> np.ndarray:
    if value is None or value == "":
        return np.full(shape, np.nan, np.float32)
    try:
        found = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        raise BadInput(f"{where} = {value!r}: must be a number") from None
    if found.shape != shape:
        raise BadInput(f"{where}: has shape {list(found.shape)}, the model takes {list(shape)}")
    return found
