"""The files of one registry version: a SavedModel where TensorFlow Serving looks, the `.keras` file beside it."""

import os
import shutil
from pathlib import Path

from trainer.export import KERAS_FILE, SAVED_MODEL


def version_folder(model: Path, folder: Path) -> Path:
    """Lays out `folder` as TensorFlow Serving expects a version, from a trained model's folder; returns it."""
    shutil.copytree(model / SAVED_MODEL, folder, copy_function=_link)
    _link(str(model / KERAS_FILE), str(folder / KERAS_FILE))
    return folder


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
