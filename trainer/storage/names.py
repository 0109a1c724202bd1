"""Names of files in a folder or a bucket: which are allowed, where they lie, and which are our own bookkeeping.

A name is relative, with forward slashes: `variables/variables.index`. Names come from buckets and manifests, that is
from strangers, so each is checked before a path is made of it: no name can lead out of the folder it is meant for.
"""

import os
import re
import secrets
from pathlib import Path

from trainer.errors import BadInput

SCHEME = "gs://"

# Locks, unfinished files and the like carry this prefix wherever they lie. They are never listed, staged or published.
OURS = ".trireme-"

# The object that says whether a prefix was published whole, and what it holds.
MARKER = OURS + "published.json"

# Files that announce a folder to its readers. A bucket shows objects one by one, so these follow all they speak of.
ANNOUNCING = ("saved_model.pb", "record.json", "manifest.json")

_LONGEST_PART_BYTES = 255  # of a file's name on Linux
_LONGEST_NAME_BYTES = 1024  # of an object's name in a bucket


def checked_name(name: str) -> str:
    """Return `name` if a file of this name lies inside whatever folder it is put in.

    Raises:
        BadInput: The name is empty, absolute or too long, has a backslash, a control character, an empty part, `.` or
            `..`, is not Unicode text, or is one that storage keeps for itself.
    """
    rule = None
    if not isinstance(name, str) or not name:
        rule = "a name is a text that is not empty"
    elif "\\" in name or re.search(r"[\x00-\x1f\x7f]", name):
        rule = "no backslashes and no control characters"
    elif name.startswith("/"):
        rule = "names are relative"
    elif any(part in ("", ".", "..") for part in name.split("/")):
        rule = "no empty part, no `.` and no `..`"
    elif is_ours(name):
        rule = f"names that begin with {OURS} are kept for storage itself"
    else:
        try:
            parts = [part.encode() for part in name.split("/")]
        except UnicodeEncodeError:
            rule = "names are Unicode text"
        else:
            if max(map(len, parts)) > _LONGEST_PART_BYTES or len(name.encode()) > _LONGEST_NAME_BYTES:
                rule = f"at most {_LONGEST_PART_BYTES} bytes a part and {_LONGEST_NAME_BYTES} bytes in all"
    if rule:
        raise BadInput(f"name {str(name)[:200]!a}: refused: {rule}")
    return name


def checked_names(names) -> list[str]:
    """Return the names sorted and without repeats, if all of them can lie in one folder together.

    Raises:
        BadInput: One is refused by `checked_name`, or is at once a file and the folder of another.
    """
    good = sorted({checked_name(name) for name in names})
    files = set(good)
    for name in good:
        parts = name.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in files:
                raise BadInput(f"name {'/'.join(parts[:depth])!a}: refused: it is a file and the folder of {name!a}")
    return good


def is_ours(name: str) -> bool:
    """Say whether any part of the name is storage's own bookkeeping."""
    return any(part.startswith(OURS) for part in name.split("/"))


def place(folder: Path, name: str) -> Path:
    """Return the path of `name` in `folder`, with its parent folders made.

    Raises:
        BadInput: The name is refused, or a symbolic link on the way leads out of the folder.
    """
    path = folder / checked_name(name)
    root = folder.resolve()
    if not path.parent.resolve().is_relative_to(root):
        raise BadInput(f"{path}: refused: a symbolic link leads out of {root}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def aside(parent: Path, kind: str) -> Path:
    """Return a path in `parent` that nobody else uses, for something that is not finished (`part`, `new`, `old`)."""
    return parent / f"{OURS}{secrets.token_hex(8)}.{kind}"


def split_uri(uri: str) -> tuple[str, str]:
    """Split `gs://bucket/a/b/` into `bucket` and `a/b`.

    Raises:
        BadInput: The URI names no bucket, or what no bucket is called.
    """
    bucket, _, prefix = uri.removeprefix(SCHEME).partition("/")
    if not bucket:
        raise BadInput(f"{uri!a}: names no bucket: write gs://BUCKET/PREFIX")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*[a-z0-9]", bucket):
        rule = "lower-case letters, digits, '-', '_' and '.', with a letter or digit at both ends"
        raise BadInput(f"{uri!a}: no bucket is called {bucket!a}: {rule}")
    return bucket, prefix.strip("/")


def is_remote(uri: str | Path) -> bool:
    """Say whether `uri` lies in a bucket rather than in a plain folder.

    Raises:
        BadInput: It is neither, or empty.
    """
    text = os.fspath(uri)
    if text.startswith(SCHEME):
        return True
    if not text or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text):  # also with a slash missing
        raise BadInput(f"{text!a}: storage knows plain folders and {SCHEME} only")
    return False


def join(uri: str | Path, *parts: str) -> str:
    """Append names to a folder or prefix: `join("gs://b/models", "digits", "3")` is `gs://b/models/digits/3`.

    Raises:
        BadInput: A part could lead out of `uri`.
    """
    is_remote(uri)
    text = os.fspath(uri)
    root = "/" if text.strip("/") == "" else text.rstrip("/")
    return "/".join([root.rstrip("/") if parts else root, *map(checked_name, parts)])


def in_closing_order(names) -> tuple[list[str], list[str]]:
    """Split names into those whose order does not matter and those that follow one by one, the manifest last."""
    last = [name for name in ANNOUNCING if name in names]
    return [name for name in names if name not in last], last
