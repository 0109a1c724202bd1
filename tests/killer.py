"""Kill an operation on a registry before each thing it does to the system in turn; leave one registry for each death.

    python killer.py OPERATION MODEL RESULTS

RESULTS is a folder or `gs://bucket/prefix`. In `RESULTS/n` a registry with three versions is made, 3 and then 1 champion;
then a fork of this process works on it and dies by SIGKILL at its nth open, rename, request and so on, for n from 1
until the operation comes through alive. Prints how often it died.
"""

import os
import signal
import sys

from trainer import storage
from trainer.registry import Registry

OPERATIONS = {
    "publish": lambda registry, model: registry.publish(model, {"by": "killer"}),
    "promote": lambda registry, model: registry.promote(2, 1, "killer"),
    "rollback": lambda registry, model: registry.rollback("killer"),
    "retain": lambda registry, model: registry.retain(1),
}
LOCAL = ("open", "os.", "shutil.", "fcntl.")
REMOTE = ("http.client.send",)


def main(operation, model, results):
    touches = REMOTE if storage.is_remote(results) else LOCAL
    for nth in range(1, 1000):
        registry = Registry(storage.join(results, str(nth)), "m")
        for _ in range(3):
            registry.publish(model, {})
        registry.promote(3, None, "a")
        registry.promote(1, 3, "b")
        child = os.fork()
        if child == 0:
            touched = 0

            def count(event, arguments, nth=nth):
                nonlocal touched
                if event.startswith(touches):
                    touched += 1
                    if touched == nth:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            OPERATIONS[operation](registry, model)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            print(nth - 1)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
