"""Kill an operation on a registry before each thing it does to the system in turn; leave one folder for each death.

    python killer.py OPERATION TEMPLATE RESULTS

A fork of this process works on a copy of TEMPLATE, `RESULTS/n`, and dies by SIGKILL at its nth open, rename, mkdir and
so on, for n from 1 until the operation comes through alive. Prints how often it died.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from trainer.registry import Registry

OPERATIONS = {
    "publish": lambda registry, model: registry.publish(model, {"by": "killer"}),
    "promote": lambda registry, model: registry.promote(2, 1, "killer"),
    "rollback": lambda registry, model: registry.rollback("killer"),
    "retain": lambda registry, model: registry.retain(1),
}
TOUCHES = ("open", "os.", "shutil.", "fcntl.")


def main(operation, template, results):
    for nth in range(1, 1000):
        root = Path(results, str(nth))
        shutil.copytree(template, root)
        child = os.fork()
        if child == 0:
            touched = 0

            def count(event, arguments, nth=nth):
                nonlocal touched
                if event.startswith(TOUCHES):
                    touched += 1
                    if touched == nth:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            OPERATIONS[operation](Registry(root, "m"), root / "model")
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            print(nth - 1)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
