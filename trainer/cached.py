"""Where the prepared data is that Kubeflow's cache may hand out again, so that what was deleted since is made anew.

    key = key_of(data, seed, code, found)
    again(root, key, run)                # before the preparation: "" while all is well, else what makes the cache miss
    remember(root, key, uri, again)      # after it

The cache answers with the address of an old output and never looks whether anything is there.
"""

import hashlib
import json
import sys
from typing import Any

from trainer import storage
from trainer.data.manifest import FILE_NAME
from trainer.errors import TriremeError
from trainer.progress import say

_FOLDER = "cached"


def key_of(*parameters: Any) -> str:
    """Names a preparation by all that the cache compares."""
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:32]


def remember(root: str, key: str, uri: str, again: str) -> None:
    """Notes the address of an output in a bucket. A task does not fail because it cannot: it says so on standard error."""
    if not (storage.is_remote(root) and storage.is_remote(uri)):
        return
    try:
        storage.write_json(storage.join(root, _FOLDER, f"{key}.json"), {"uri": uri, "again": again})
    except (TriremeError, OSError) as error:
        print(f"warning: the place of the prepared data could not be noted in {root}: {error}", file=sys.stderr)


def again(root: str, key: str, run: str) -> str:
    """A parameter for the preparation that is the same as the last time, or the run's name where its output is gone.

    Args:
        root: Folder or `gs://` prefix of the runs.
        key: Of the preparation.
        run: The run's identifier.
    """
    if not storage.is_remote(root):
        return ""
    try:
        known, _ = storage.read_json(storage.join(root, _FOLDER, f"{key}.json"))
        if not known:
            return ""
        if storage.exists(storage.join(known["uri"], FILE_NAME)):
            return str(known["again"])
    except (TriremeError, OSError) as error:
        print(f"warning: whether the prepared data is still there could not be told: {error}", file=sys.stderr)
        return ""
    say(f"{known['uri']} was deleted, and the cache would still hand it out: the data is prepared anew")
    return run
