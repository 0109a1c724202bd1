"""Images in folders, one folder a class: `<path>/<split>/<class>/…`, or `<path>/<class>/…` where splits are shares."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.config import DataConfig
from trainer.data.files import SourceFile, content_identity, describe_files, find_files
from trainer.data.manifest import Feature
from trainer.data.pictures import decode_all, first_size
from trainer.data.source import BadRecord, Chunk, Part, is_text
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
        shape, resize = self.features["image"].shape, self._config.image_size is not None
        for start in range(first, last, _CHUNK):
            files = self._files[start : min(start + _CHUNK, last)]
            classes = self._classes[start : start + len(files)]
            pixels, sizes, faults = decode_all([file.path.read_bytes() for file in files], shape, resize=resize)
            kept = [place for place in range(len(files)) if place not in faults]
            yield Chunk(
                {"image": pixels[kept]},
                [classes[place] for place in kept],
                image_sizes={"image": [sizes[place] for place in kept]},
                bad=[BadRecord(files[place].name, 0, fault) for place, fault in sorted(faults.items())],
            )

    def _class_of(self, file: SourceFile) -> str:
        folders = PurePosixPath(file.name).parts[:-1]
        depth = 0 if file.split is None else len(PurePosixPath(self._config.splits.named()[file.split]).parts)
        if len(folders) != depth + 1:
            raise BadInput(
                f"data.path = {json.dumps(self._config.path)}: {file.name} should stand in a folder named after its"
                f" class, right under {'the path' if depth == 0 else 'the folder of its split'}"
            )
        if not is_text(folders[-1]):
            raise BadInput(f"{file.name!a}: the name of the class is not valid UTF-8; rename the folder")
        return folders[-1]

    def _first_size(self) -> tuple[int, int]:
        size = first_size(file.path.read_bytes() for file in self._files[:100])
        if size is None:
            raise BadInput(f"data.path = {json.dumps(self._config.path)}: no image in it can be decoded")
        return size

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
