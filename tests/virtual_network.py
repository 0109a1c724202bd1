"""Hosts on one machine: a network namespace each, an address of its own, a virtual cable to one switch.

    with Network(folder) as network:
        host = network.host(["worker-0.train"])     # a name that all hosts resolve
        host.limit("10mbit"); host.unplug()
        with network.inside(): ...                  # sockets made here are those of the switch, 10.77.0.1

Nothing outside the namespaces is changed: they end with the process that made them.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_SUBNET = "10.77.0"


def missing():
    """Why there can be no virtual network here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "unshare", "mount"):
        if shutil.which(program) is None:
            return f"there is no program `{program}` (Debian packages iproute2, util-linux, mount)"
    tried = subprocess.run(
        "unshare --net --mount --uts --pid --fork --mount-proc sh -c 'ip link add left type veth peer name right &&"
        " ip link add middle type bridge && tc qdisc add dev left root tbf rate 1mbit burst 32kb latency 50ms'",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


class _Namespace:
    """A network namespace that lives as long as a small process in it."""

    def __init__(self):
        own = Path("/proc/self/ns/net").readlink()
        self._holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.pid = self._holder.pid
        path = Path(f"/proc/{self.pid}/ns/net")
        while path.readlink() == own:
            time.sleep(0.002)

    @contextlib.contextmanager
    def inside(self):
        """This thread, and processes and threads that it starts, are in the namespace while the block runs."""
        with Path("/proc/thread-self/ns/net").open() as here, Path(f"/proc/{self.pid}/ns/net").open() as there:
            _enter(there)
            try:
                yield
            finally:
                _enter(here)

    def run(self, *commands):
        with self.inside():
            for command in commands:
                subprocess.run(command.split(), check=True, capture_output=True, text=True)

    def close(self):
        self._holder.stdin.close()
        self._holder.wait()


def _enter(file):
    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Network(_Namespace):
    """The switch, with an address of its own for servers that are no hosts, and the names of all hosts."""

    address = f"{_SUBNET}.1"

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)
        self.hosts_file = self.folder / "hosts"
        self._names, self._hosts, self._next = {}, [], 10
        self._write_names()
        self.run(
            "ip link set lo up",
            "ip link add switch type bridge",
            f"ip addr add {self.address}/24 dev switch",
            "ip link set switch up",
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for host in self._hosts:
            host.close()
        self.close()

    def host(self, names=()):
        """A new host with a new address; the names, where another host had them, are its own from now on."""
        self._next += 1
        host = Host(self, f"{_SUBNET}.{self._next}", f"port{self._next}")
        self._hosts.append(host)
        self._names |= dict.fromkeys(names, host.address)
        self._write_names()
        return host

    def _write_names(self):
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._names.items())]
        # In place, because the hosts have this very file mounted.
        self.hosts_file.write_text("\n".join(lines) + "\n")


class Host(_Namespace):
    """One host: what it runs sees its own network, processes, host name and temporary folder."""

    def __init__(self, network, address, port):
        super().__init__()
        self.network, self.address = network, address
        network.run(
            f"ip link add {port} type veth peer name eth0 netns {self.pid}", f"ip link set {port} master switch up"
        )
        self.run("ip link set lo up", f"ip addr add {address}/24 dev eth0", "ip link set eth0 up")

    def limit(self, rate, burst="64kb"):
        """What the host sends goes at this rate at most, such as `10mbit`."""
        self.run(f"tc qdisc replace dev eth0 root tbf rate {rate} burst {burst} latency 400ms")

    def sent_bytes(self):
        """What has left the host so far, headers included."""
        with self.inside():
            line = next(line for line in Path("/proc/thread-self/net/dev").read_text().splitlines() if "eth0:" in line)
        return int(line.split(":")[1].split()[8])

    def unplug(self):
        self.run("ip link set eth0 down")

    def start(self, command, environ, name, log_path, scratch):
        """Starts a program as the first process of its machine; `scratch` is a folder that is empty for it alone."""
        scratch.mkdir(parents=True, exist_ok=True)
        script = (
            'hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs -o mode=1777 tmpfs "$3"; shift 3; exec "$@"'
        )
        with self.inside(), log_path.open("ab") as log:
            return subprocess.Popen(
                ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc",
                 "sh", "-ec", script, "sh", name, self.network.hosts_file, scratch, *command],
                env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip


def first_process(process):
    """The process that a host's `start` runs, as a number on this machine; None when it is gone."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if children else None
    return None
