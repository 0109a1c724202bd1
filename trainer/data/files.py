"""Which files a source consists of, here or in a bucket.

with stage_files(config, store) as local:
    for file in find_files(config, local): file.path, file.name, file.split
"""

import fnmatch
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from trainer.config import DataConfig
from trainer.data.window import is_wanted
from trainer.errors import BadInput

_ENDINGS = {
    "csv": (".csv",),
    "tsv": (".tsv",),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "tfrecord": (".tfrecord", ".tfrecords"),
    "image_folder": (),
}
_OF_DESKTOPS = ("thumbs.db", "desktop.ini", "__macosx")  # what Windows and macOS leave in folders
_MAGIC = re.compile(r"[*?\[]|\{date\}")


class SourceFile(NamedTuple):
    """One file of a source."""

    path: Path
    """Where it is on this machine."""
    name: str
    """Its name below the source's folder, with `/`."""
    split: str | None
    """The split it was given for. None: splits are shares."""


@contextmanager
def stage_files(config: DataConfig, store: Path | None) -> Iterator[Path | None]:
    """For the block's time, a local copy of the files of a `gs://` source; None where they are here.

    Args:
        config: The data section.
        store: Where large copies may stand. None: among temporary files.
    """
    if config.source == "tfds" or config.path is None or not config.path.startswith("gs://"):
        yield None
        return
    from trainer.storage import list_names, stage

    root, pattern = _root(config.path)
    names = list_names(root)
    wanted = [name for name in names if _belongs(name, pattern, config)]
    if not wanted:
        raise BadInput(
            f"data.path = {json.dumps(config.path)}: there are no such files"
            + (f" ({len(names):,} others are there)" if names else "")
        )
    with tempfile.TemporaryDirectory(prefix=".source-", dir=store if store and store.is_dir() else None) as folder:
        stage(root, folder, wanted)
        yield Path(folder)


def find_files(config: DataConfig, local: Path | None) -> list[SourceFile]:
    """The files, in the order of their names.

    Args:
        config: The data section.
        local: Folder with the files of a bucket; None: they are where `data.path` says.

    Raises:
        BadInput: There are none, or none for a split, or one belongs to two splits.
    """
    root, pattern = _root(config.path)
    folder = local or Path(root).expanduser()
    if not folder.exists():
        raise BadInput(f"data.path = {json.dumps(config.path)}: does not exist")
    if pattern is not None and not _MAGIC.search(pattern):  # one file, whatever else its folder holds
        names = [pattern] if (folder / pattern).is_file() else []
    elif not folder.is_dir():
        names = []
    else:
        names = sorted(_walk(str(folder), "", [os.path.realpath(folder)]))
    shown = json.dumps(config.path)
    if config.splits.shares():
        found = [SourceFile(folder / name, name, None) for name in names if _belongs(name, pattern, config)]
        if not found:
            ends = " or ".join(_ENDINGS[config.source])
            endings = f" (their names end in {ends})" if ends and pattern is None else ""
            raise BadInput(f"data.path = {shown}: there are no {config.source} files{endings}")
        return _checked_links(found)
    if pattern is not None:
        raise BadInput(f"data.path = {shown}: must be a folder, because data.splits are patterns of files in it")
    taken: dict[str, str] = {}
    for split, given in config.splits.named().items():
        wanted = f"{given.rstrip('/')}/*" if config.source == "image_folder" else given
        chosen = [name for name in names if fnmatch.fnmatchcase(name, wanted)]
        if not chosen:
            raise BadInput(f"data.splits.{split} = {json.dumps(given)}: matches no file under {config.path}")
        for name in chosen:
            if name in taken:
                raise BadInput(f"data.splits.{split} = {json.dumps(given)}: {name} belongs to {taken[name]} already")
            taken[name] = split
    return _checked_links([SourceFile(folder / name, name, taken[name]) for name in sorted(taken)])


def content_identity(files: Sequence[SourceFile]) -> list[list[str | int | None]]:
    """Name, split, size and digest of each file: the same wherever the files stand."""
    found = []
    for file in files:
        with file.path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        found.append([file.name, file.split, file.path.stat().st_size, digest])
    return found


def describe_files(config: DataConfig, files: Sequence[SourceFile]) -> dict[str, str | int | None]:
    """Kind and names for a manifest; no folder, because the content is the same in another one, and no number of files
    where a column says which rows are taken, because the same rows are the same content."""
    name = PurePosixPath(config.path.rstrip("/")).name
    by_row = config.window is not None and config.window.column is not None
    given = {f"split.{split}": value for split, value in config.splits.named().items()}
    num_files = None if by_row else len(files)
    return {"kind": config.source, "name": name, "num_files": num_files, **given, "split.by": config.splits.by}


def _root(path: str) -> tuple[str, str | None]:
    """Folder and pattern below it; the pattern is None where the path has none."""
    scheme, _, rest = path.rpartition("://")
    parts = rest.split("/")
    fixed = next((index for index, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    is_file = fixed == len(parts) and PurePosixPath(rest).suffix in {end for ends in _ENDINGS.values() for end in ends}
    cut = fixed - 1 if is_file else fixed
    root = "/".join(parts[:cut]) or ("/" if rest.startswith("/") else ".")
    pattern = "/".join(parts[cut:]) or None
    return (f"{scheme}://{root}" if scheme else root), pattern


def _belongs(name: str, pattern: str | None, config: DataConfig) -> bool:
    if pattern is not None:
        return is_wanted(name, pattern, config.window)
    if not config.splits.shares():
        return True
    endings = _ENDINGS[config.source]
    return name.lower().endswith(endings) if endings else True


def _walk(folder: str, prefix: str, above: list[str]) -> Iterator[str]:
    """Names of the files below a folder. Links to folders are followed, but not into one that holds the link: what is
    there is found without it.

    Args:
        folder: The folder.
        prefix: What stands before its files' names.
        above: The folder and those that hold it, as they are really called.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith((".", "_SUCCESS")) or entry.name.lower() in _OF_DESKTOPS:
                continue
            is_link = entry.is_symlink()
            if Path(entry).is_dir() if is_link else entry.is_dir():
                real = os.path.realpath(entry.path) if is_link else f"{above[-1]}/{entry.name}"
                if real not in above:
                    yield from _walk(entry.path, f"{prefix}{entry.name}/", [*above, real])
            elif is_link or entry.is_file():
                yield prefix + entry.name


def _checked_links(files: list[SourceFile]) -> list[SourceFile]:
    for file in files:
        if file.path.is_symlink() and not file.path.is_file():
            raise BadInput(f"{file.path}: is a link that leads to no file")
    return files
