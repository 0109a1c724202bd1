"""The files of one registry version: a SavedModel where TensorFlow Serving looks, beside it the `.keras` file and what the
training data was like, against which later data is validated."""

import os
import shutil
from pathlib import Path

from trainer.config import parse_json
from trainer.data.manifest import STATISTICS_FILE
from trainer.data.schema import SCHEMA_FILE, Schema, read_schema
from trainer.data.statistics import Statistics
from trainer.export import KERAS_FILE, SAVED_MODEL

DATA_FILES = ("data_schema.json", "data_statistics.json")


def version_folder(model: Path, folder: Path) -> Path:
    """Lays out `folder` as TensorFlow Serving expects a version, from a trained model's folder; returns it."""
    shutil.copytree(model / SAVED_MODEL, folder, copy_function=_link)
    for name in (KERAS_FILE, *DATA_FILES):
        _link(str(model / name), str(folder / name))
    return folder


def keep_data(examples: Path, model: Path) -> None:
    """Puts schema and statistics of a prepared dataset beside the model that was trained on it."""
    for name, source in zip(DATA_FILES, (SCHEMA_FILE, STATISTICS_FILE), strict=True):
        _link(str(examples / source), str(model / name))


def data_of(version: Path) -> tuple[Schema, Statistics] | None:
    """Schema and statistics of the data that a version was trained on; None where it was made without them."""
    if not all((version / name).is_file() for name in DATA_FILES):
        return None
    schema, statistics = (version / name for name in DATA_FILES)
    return (
        read_schema(schema.read_text(encoding="utf-8"), path=str(schema)),
        parse_json(Statistics, statistics.read_text(encoding="utf-8"), path=str(statistics)),
    )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
