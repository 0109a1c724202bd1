"""Kill a preparation before every fifth thing that it does to the disk, from a random one on, then let another one finish.

    python prepare_killer.py TABLE FOLDER

Each time a fork of this process prepares TABLE into `FOLDER/n/out` and dies by SIGKILL at its nth open, rename and so on.
What it left must be nothing or a whole dataset; the next preparation must end with the same digest as an undisturbed one.
Prints how often it died.
"""

import os
import random
import signal
import sys
from pathlib import Path

from trainer.config import DataConfig, Splits
from trainer.data.manifest import read_manifest, verify
from trainer.data.prepare import prepare

EVERY = 5  # so many of them from one death to the next: whatever takes longer is met
TOUCHES = ("open", "os.", "shutil.", "tempfile.")


def main(table, folder):
    config = DataConfig(
        source="csv", path=table, label_key="label", min_shards=2,
        splits=Splits(train="70%", validation=None, test="30%"),
    )  # fmt: skip
    expected = prepare(config, 7, folder / "undisturbed").digest
    touched = 0

    def count(event, _):
        nonlocal touched
        touched += event.startswith(TOUCHES)

    sys.addaudithook(count)
    prepare(config, 7, folder / "counted" / "out", folder / "counted" / "store")
    deaths = range(random.randint(1, EVERY), touched, EVERY)
    for nth in deaths:
        out, store = folder / str(nth) / "out", folder / str(nth) / "store"
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            touched = 0

            def die(event, _, nth=nth):
                if touched == nth:  # noqa: B023 - the hook above goes on counting
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(die)
            prepare(config, 7, out, store)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status), (nth, os.waitstatus_to_exitcode(status))
        assert os.WTERMSIG(status) == signal.SIGKILL
        for left in [out, *(entry for entry in store.glob("*") if not entry.name.startswith("."))]:
            if left.exists():
                verify(left, read_manifest(left))
        again = folder / str(nth) / "again"
        assert prepare(config, 7, again, store).digest == expected
        verify(again, read_manifest(again))
        assert not [entry for entry in store.iterdir() if entry.name.endswith(".work")]
    print(len(deaths))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
