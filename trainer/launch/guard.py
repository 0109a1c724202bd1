"""Ends a process group when the process that started it is gone, however it went.

The launcher starts this script first, as the leader of the group that all members then join, and holds the other end of
its standard input. A launcher that is killed by SIGKILL cannot clean up; the kernel closes its pipe all the same.
"""

import os
import signal
import sys

if __name__ == "__main__":
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
