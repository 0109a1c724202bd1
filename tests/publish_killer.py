"""Kill a publication before every second thing that it sends, from a random one on, then let another one finish.

    python publish_killer.py FOLDER URI

Each time a fork of this process publishes FOLDER to `URI/n` and dies by SIGKILL at the nth thing that it sends to the bucket.
What it left must be nothing or the whole; the next publication must end with the whole. Prints how often it died.
"""

import os
import random
import signal
import sys
import tempfile
from pathlib import Path

from trainer import storage
from trainer.errors import TriremeError

EVERY = 2  # so many of them from one death to the next


def staged(uri):
    """What a reader gets."""
    with tempfile.TemporaryDirectory() as folder:
        storage.stage(uri, folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def main(folder, uri):
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    sent = 0

    def count(event, _):
        nonlocal sent
        sent += event == "http.client.send"

    sys.addaudithook(count)
    storage.publish(folder, f"{uri}/counted")
    deaths = range(random.randint(1, EVERY), sent + 1, EVERY)
    halves = 0
    for nth in deaths:
        child = os.fork()
        if child == 0:
            sent = 0

            def die(event, _, nth=nth):
                if event == "http.client.send" and sent == nth:  # noqa: B023 - the hook above goes on counting
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(die)
            storage.publish(folder, f"{uri}/{nth}")
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status), (nth, os.waitstatus_to_exitcode(status))
        try:
            assert staged(f"{uri}/{nth}") == whole
        except TriremeError:
            halves += 1
            assert not storage.exists(f"{uri}/{nth}")
        storage.publish(folder, f"{uri}/{nth}")
        assert staged(f"{uri}/{nth}") == whole
    assert halves > len(deaths) / 2
    print(len(deaths))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
