"""A folder that appears whole or not at all.

with aside(Path("examples")) as partial:
    write_everything_into(partial)
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import BadInput


@contextmanager
def aside(folder: Path) -> Iterator[Path]:
    """A sibling folder that becomes `folder` when the block ends well and disappears when it does not.

    Raises:
        BadInput: `folder` holds something already, or its parent cannot be written.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise BadInput(f"{folder}: is not empty; name a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        yield partial
        partial.chmod(0o755)
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
