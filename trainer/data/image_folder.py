"""Images in folders, one folder a class: `<path>/<split>/<class>/…`, or `<path>/<class>/…` where splits are shares."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from trainer.config import DataConfig
from trainer.data.files import SourceFile, content_identity, describe_files, find_files
from trainer.data.manifest import Feature
from trainer.data.pictures import BadImage, decode
from trainer.data.source import BadRecord, Chunk, Part
from trainer.errors import BadInput

_CHUNK = 64
_PART_FILES = 2048


class ImageFolderSource:
    """The images under a folder; classes are the folders' names.

    Args:
        config: The data section.
        local: Where the files of a bucket were staged.

    Raises:
        BadInput: There is no folder, no class, or no image that can be decoded.
    """

    label_name = "label"
    weight_name = None
    is_classification = True

    def __init__(self, config: DataConfig, local: Path | None) -> None:
        self._config = config
        self._files = find_files(config, local)
        self._channels = config.image_channels or 3
        self._classes = [self._class_of(file) for file in self._files]
        self.class_names = sorted(set(self._classes))
        size = config.image_size or self._first_size()
        self.features = {"image": Feature(kind="image", shape=(*size, self._channels))}
        self.parts = list(self._cut())

    def identity(self) -> dict[str, Any]:
        """Name and digest of every file."""
        return {**self.description(), "files": content_identity(self._files)}

    def description(self) -> dict[str, str | int | None]:
        """Kind and names, for the manifest."""
        return describe_files(self._config, self._files)

    def read(self, part: Part) -> Iterator[Chunk]:
        """Decoded images and their classes."""
        first, last = part.place
        for start in range(first, last, _CHUNK):
            places = range(start, min(start + _CHUNK, last))
            images, labels, sizes, bad = [], [], [], []
            for place in places:
                try:
                    pixels, before = self._decode(self._files[place])
                except BadImage as error:
                    bad.append(BadRecord(self._files[place].name, 0, str(error)))
                    continue
                images.append(pixels)
                labels.append(self._classes[place])
                sizes.append(f"{before[0]}×{before[1]}")
            yield Chunk({"image": np.array(images)}, labels, image_sizes={"image": sizes}, bad=bad)

    def _decode(self, file: SourceFile) -> tuple[np.ndarray, tuple[int, int]]:
        pixels, before = decode(file.path.read_bytes(), self._config.image_size, self._channels)
        wanted = self.features["image"].shape
        if pixels.shape != wanted:
            raise BadImage(f"has {before[0]}×{before[1]} pixels, not {wanted[0]}×{wanted[1]}; set data.image_size")
        return pixels, before

    def _class_of(self, file: SourceFile) -> str:
        folders = PurePosixPath(file.name).parts[:-1]
        depth = 0 if file.split is None else len(PurePosixPath(self._config.splits.named()[file.split]).parts)
        if len(folders) != depth + 1:
            raise BadInput(
                f"data.path = {json.dumps(self._config.path)}: {file.name} should stand in a folder named after its"
                f" class, right under {'the path' if depth == 0 else 'the folder of its split'}"
            )
        return folders[-1]

    def _first_size(self) -> tuple[int, int]:
        for file in self._files[:100]:
            try:
                return decode(file.path.read_bytes(), None, self._channels)[1]
            except BadImage:
                continue
        raise BadInput(f"data.path = {json.dumps(self._config.path)}: no image in it can be decoded")

    def _cut(self) -> Iterator[Part]:
        """Runs of files of one split."""
        start = 0
        for place in range(1, len(self._files) + 1):
            ended = place == len(self._files) or self._files[place].split != self._files[start].split
            if ended or place - start == _PART_FILES:
                files = self._files[start:place]
                size = sum(file.path.stat().st_size for file in files)
                yield Part(files[0].split, [start, place], len(files), size)
                start = place
