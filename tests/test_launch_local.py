"""The local launcher with real, small processes: whose fault it was, restarts, signals, and nothing left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from trainer.errors import BadInput
from trainer.launch import MemberFailure
from trainer.launch.local import run_group

PROLOGUE = """
import json, os, pathlib, signal, sys, time
config = json.loads(os.environ.get("TF_CONFIG", "{}"))
kind, index = (config["task"]["type"], config["task"]["index"]) if config else ("worker", 0)
me = f"{kind} {index}"
folder = pathlib.Path(sys.argv[1])
def count():
    "Which start of this process it is, from 1."
    mark = folder / me.replace(" ", "-")
    n = int(mark.read_text()) + 1 if mark.exists() else 1
    aside = mark.with_suffix(".new")  # a process that is ended while it writes leaves no empty file
    aside.write_text(str(n))
    aside.rename(mark)
    return n
def echo_when(path):
    while not (folder / path).exists(): time.sleep(0.01)
    print("UnavailableError: Collective ops is aborted by: Socket closed")
    sys.exit(1)
def forever(): time.sleep(300)
"""
WAIT = f"""
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from trainer.cluster import describe
from trainer.rendezvous import wait_for_peers
wait_for_peers(describe(os.environ), float(os.environ["WAIT_SECS"]))
"""


class Run:
    def __init__(self, folder):
        self.folder = folder
        self.said = []

    def __call__(self, body, num_workers=2, num_parameter_servers=0, max_restarts=0, grace_period_secs=5.0, **more):
        script = self.folder / "member.py"
        script.write_text(PROLOGUE + body)
        return run_group(
            [sys.executable, str(script), str(self.folder)],
            num_workers,
            num_parameter_servers,
            max_restarts=max_restarts,
            grace_period_secs=grace_period_secs,
            log_folder=self.folder / "logs",
            emit=lambda source, line: self.said.append((source, line)),
            **more,
        )

    def news(self):
        return [line for source, line in self.said if source == "launcher"]


def left_behind(folder):
    """Processes whose command line names the folder of this test."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if str(folder) in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture
def run(tmp_path):
    yield Run(tmp_path)
    assert left_behind(tmp_path) == []
    assert [child for child in psutil.Process().children(recursive=True) if "guard.py" in str(child.cmdline())] == []


def wait_until(condition, timeout_secs=20.0):
    end = time.monotonic() + timeout_secs
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_each_process_knows_its_place_and_its_lines_come_under_its_name(run):
    result = run("print(json.dumps(config)); print('to stderr', file=sys.stderr)", num_workers=3)
    assert (result.exit_code, result.restarts, result.first_failure) == (0, 0, None)
    configs = {source: json.loads(line) for source, line in run.said if line.startswith("{")}
    assert {name: config["task"] for name, config in configs.items()} == {
        f"worker {i}": {"type": "worker", "index": i} for i in range(3)
    }
    assert len({json.dumps(config["cluster"]) for config in configs.values()}) == 1
    assert len(set(configs["worker 0"]["cluster"]["worker"])) == 3
    assert (run.folder / "logs" / "worker-2.log").read_text().splitlines()[-1] == "to stderr"
    assert ("worker 1", "to stderr") in run.said


def test_one_worker_alone_has_no_cluster_whatever_the_environment_says(run):
    environ = dict(os.environ, TF_CONFIG='{"cluster": {"worker": ["a:1", "b:1"]}}', CLUSTER_SPEC="{}", MORE="kept")
    result = run("print(os.environ.get('TF_CONFIG'), os.environ['MORE'])", num_workers=1, environ=environ)
    assert result.exit_code == 0
    assert ("worker 0", "None kept") in run.said


def test_the_crash_is_reported_and_not_its_echo_though_the_echo_comes_first(run):
    result = run(
        """
if index == 0:
    (folder / "down").touch()
    time.sleep(0.7)  # TensorFlow's shutdown takes longer than the peer needs to notice
    print("UNAVAILABLE: Collective ops is aborted by: Socket closed")  # it also speaks of peers while it goes down
    {}["boom"]
echo_when("down")
"""
    )
    assert result.exit_code == 1
    assert result.first_failure.member == "worker 0"
    assert result.first_failure.last_lines[-1] == "KeyError: 'boom'"
    assert str(result.first_failure) == "worker 0 ended with exit code 1"


def test_noise_after_an_exception_of_ones_own_does_not_make_it_an_echo():
    lines = (
        "Traceback (most recent call last):",
        "ValueError: bad label",
        "UNAVAILABLE: Collective ops is aborted by: x",
    )
    assert not MemberFailure(member="worker 0", exit_code=1, last_lines=lines).is_echo
    tensorflow = ("tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error:", "", *lines[2:])
    assert MemberFailure(member="worker 0", exit_code=1, last_lines=tensorflow).is_echo
    mine = ("trainer.errors.WorldFailure: worker 0 lost its peer: worker 1 (b:1) has died or stopped answering.",)
    assert MemberFailure(member="worker 0", exit_code=1, last_lines=mine).is_echo
    assert not MemberFailure(member="worker 0", signal=signal.SIGKILL, last_lines=mine).is_echo


def test_a_killed_worker_is_named_with_its_signal(run):
    result = run(
        """
if index == 1:
    time.sleep(0.2)
    (folder / "down").touch()
    os.kill(os.getpid(), signal.SIGKILL)
echo_when("down")
"""
    )
    assert (result.exit_code, result.first_failure.member, result.first_failure.signal) == (
        1,
        "worker 1",
        signal.SIGKILL,
    )
    assert str(result.first_failure).startswith("worker 1 was ended by SIGKILL")


def test_a_frozen_worker_is_the_one_that_the_others_name(run, monkeypatch):
    monkeypatch.setattr("trainer.launch.local._SETTLE_SECS", 0.5)
    start = time.monotonic()
    result = run(
        """
print(f"I am {me}")
if index == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if index == 2:
    forever()  # healthy, and slow to notice
print("UnavailableError: Collective ops is aborted by: no heartbeat of /job:worker/replica:0/task:1")
sys.exit(1)
""",
        num_workers=3,
    )
    assert time.monotonic() - start < 4
    assert result.exit_code == 1
    assert str(result.first_failure) == "worker 1 stopped answering"
    assert result.first_failure.last_lines == ("I am worker 1",)


def test_the_rest_is_asked_to_end_and_then_made_to(run, monkeypatch):
    monkeypatch.setattr("trainer.launch.local._END_GRACE_SECS", 1.0)
    result = run(
        """
if index == 0:
    while not all((folder / f"ready-{i}").exists() for i in (1, 2)): time.sleep(0.01)
    sys.exit(7)
def leave(*_):
    print("asked to end")
    if index == 1: sys.exit(0)
signal.signal(signal.SIGTERM, leave)
(folder / f"ready-{index}").touch()
while True: time.sleep(0.05)
""",
        num_workers=3,
    )
    assert (result.exit_code, result.first_failure.member) == (7, "worker 0")
    assert [source for source, line in run.said if line == "asked to end"] in (
        ["worker 1", "worker 2"],
        ["worker 2", "worker 1"],
    )


def test_the_group_is_started_again_as_a_whole_until_it_is_done(run):
    result = run("n = count(); print(f'start {n}'); sys.exit(1 if index == 0 and n < 3 else 0)", max_restarts=5)
    assert (result.exit_code, result.restarts, result.first_failure) == (0, 2, None)
    assert [line for source, line in run.said if source == "worker 0"] == ["start 1", "start 2", "start 3"]
    assert "(1 of 5)" in run.news()[0]
    log = (run.folder / "logs" / "worker-0.log").read_text()
    assert log == "start 1\n--- started again ---\nstart 2\n--- started again ---\nstart 3\n"


def test_when_no_restart_is_left_the_failure_is_given(run):
    result = run("count(); sys.exit(9 if index == 1 else 0)", max_restarts=2)
    assert (result.exit_code, result.restarts, result.first_failure.member) == (9, 2, "worker 1")
    assert (run.folder / "worker-1").read_text() == "3"
    assert run.news()[-1] == "worker 1 ended with exit code 9; no restart is left (cluster.max_restarts is 2)"


def test_bad_input_is_never_started_again(run):
    result = run("count(); print('train.epochs = 0: must be positive'); sys.exit(2)", max_restarts=5)
    assert (result.exit_code, result.restarts, result.first_failure.exit_code) == (2, 0, 2)
    assert result.first_failure.last_lines == ("train.epochs = 0: must be positive",)
    assert (run.folder / result.first_failure.member.replace(" ", "-")).read_text() == "1"


def test_a_program_that_does_not_exist_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="no such program"):
        run_group(["no-such"], 2, max_restarts=0, grace_period_secs=1, log_folder=tmp_path, emit=lambda *_: None)


def test_a_port_taken_between_choosing_and_binding_costs_no_restart(run):
    thieves = []

    def steal(number):
        held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
        for one in held:
            one.close()
        if not thieves:
            thieves.append(socket.create_server(("", int(addresses[1].split(":")[1]))))
        return addresses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.launch.local._free_addresses", steal)
        patch.setenv("WAIT_SECS", "10")
        result = run(WAIT)
    thieves[0].close()
    assert (result.exit_code, result.restarts) == (0, 0), run.said
    assert re.fullmatch("worker 1 ended with exit code 1: a port was taken meanwhile; .*", run.news()[0])


def test_a_worker_that_never_comes_to_the_start_is_the_culprit(run, monkeypatch):
    monkeypatch.setattr("trainer.launch.local._SETTLE_SECS", 0.5)
    monkeypatch.setenv("WAIT_SECS", "1.5")
    result = run("if index == 1: print('stuck before the start'), forever()" + WAIT, num_workers=3)
    assert str(result.first_failure) == "worker 1 stopped answering"
    assert result.first_failure.last_lines == ("stuck before the start",)
    assert re.search(r"worker \d lost its peer before the start: .* worker 1 \(127", str(run.said))


# Parameter servers: they never end by themselves, and a lost worker does not end the group.


def test_the_chief_ends_the_group_and_the_servers_are_put_away(run):
    result = run("if kind != 'chief': forever()\nprint(sorted(config['cluster']))", 2, 2)
    assert result.exit_code == 0
    assert ("chief", "['chief', 'ps', 'worker']") in run.said
    names = {path.name for path in (run.folder / "logs").iterdir()}
    assert names == {"chief.log", "worker-0.log", "worker-1.log", "ps-0.log", "ps-1.log"}


def test_a_lost_worker_is_started_again_alone_at_the_same_address(run):
    result = run(
        """
n = count()
print(config["cluster"]["worker"])
if me == "worker 1":
    if n == 1: os.kill(os.getpid(), signal.SIGKILL)
    (folder / "back").touch()
if kind != "chief": forever()
while not (folder / "back").exists(): time.sleep(0.01)
""",
        2,
        1,
        max_restarts=1,
    )
    assert (result.exit_code, result.restarts, result.first_failure) == (0, 0, None)
    assert {one: (run.folder / one).read_text() for one in ("chief-0", "worker-0", "worker-1", "ps-0")} == {
        "chief-0": "1",
        "worker-0": "1",
        "worker-1": "2",
        "ps-0": "1",
    }
    assert len({line for source, line in run.said if source == "worker 1"}) == 1
    assert "starting it again alone (1 of 1)" in run.news()[0]


def test_a_lost_parameter_server_starts_the_group_again(run):
    result = run(
        """
n = count()
if kind == "ps" and n == 1: os.kill(os.getpid(), signal.SIGKILL)
if kind != "chief" or n == 1: forever()
""",
        1,
        1,
        max_restarts=1,
    )
    assert (result.exit_code, result.restarts) == (0, 1)
    assert run.news()[0].startswith("parameter server 0 was ended by SIGKILL")


def test_the_group_goes_on_without_a_worker_that_keeps_failing_but_not_without_all(run):
    body = """
if kind == "worker" and (index == 0 or %r): sys.exit(5)
if kind != "chief": forever()
time.sleep(1.0)
"""
    assert run(body % False, 2, 1, max_restarts=1).exit_code == 0
    assert run.news()[-1] == "worker 0 ended with exit code 5; it was started again 1 times: going on without it"
    result = run(body % True + "forever()", 2, 1)
    assert (result.exit_code, result.first_failure.exit_code) == (5, 5)


# Signals. The launcher is a process of its own here, as `trireme run` is.

LAUNCHER = """
import pathlib, sys
sys.path.insert(0, {root!r})
from trainer.launch.local import run_group
if __name__ == "__main__":
    result = run_group([sys.executable, {script!r}, {folder!r}], {num_workers}, {num_servers}, max_restarts=3,
        grace_period_secs={grace}, log_folder=pathlib.Path({folder!r}) / "logs",
        emit=lambda source, line: print(f"[{{source}}] {{line}}", flush=True))
    print("result", result.exit_code, result.restarts, result.first_failure, flush=True)
    sys.exit(result.exit_code)
"""


class Launched:
    def __init__(self, folder, body, *, num_workers=2, num_servers=0, grace=20.0):
        script, launcher = folder / "member.py", folder / "launcher.py"
        script.write_text(PROLOGUE + body)
        root = str(Path(__file__).parents[1])
        given = {"root": root, "script": str(script), "folder": str(folder)}
        launcher.write_text(LAUNCHER.format(**given, num_workers=num_workers, num_servers=num_servers, grace=grace))
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(launcher)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.out = ""
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.out += line

    def end(self, timeout_secs=20):
        exit_code = self.process.wait(timeout_secs)
        self.reader.join()
        self.process.stdout.close()
        return exit_code


@pytest.fixture
def launched(tmp_path):
    runs = []

    def launch(body, **more):
        runs.append(Launched(tmp_path, body, **more))
        return runs[-1]

    yield launch
    for one in runs:
        if one.process.poll() is None:
            one.process.kill()
            one.end()
    wait_until(lambda: left_behind(tmp_path) == [], 5.0)


SAVES = """
def save(*_):
    time.sleep(0.5)
    (folder / f"saved-{me}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready")
forever()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_lets_every_worker_save_and_ends_with_143(launched, number):
    one = launched(SAVES)
    wait_until(lambda: one.out.count("ready") == 2)
    one.process.send_signal(number)
    assert one.end() == 143
    assert (one.folder / "saved-worker 0").exists()
    assert (one.folder / "saved-worker 1").exists()
    assert "result 143 0 None" in one.out


def test_under_parameter_servers_the_chief_saves_while_the_servers_are_still_there(launched):
    body = """
if kind != "chief":
    signal.signal(signal.SIGTERM, lambda *_: ((folder / f"told-{kind}").touch(), sys.exit(0)))
    print("ready")
    forever()
def save(*_):
    time.sleep(0.5)
    print("servers told:", (folder / "told-ps").exists(), "workers told:", (folder / "told-worker").exists())
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready")
forever()
"""
    one = launched(body, num_workers=1, num_servers=1)
    wait_until(lambda: one.out.count("ready") == 3)
    one.process.terminate()
    assert one.end() == 143
    assert "servers told: False workers told: False" in one.out


def test_a_second_sigterm_ends_at_once(launched):
    one = launched(SAVES.replace("0.5", "60"))
    wait_until(lambda: one.out.count("ready") == 2)
    one.process.terminate()
    wait_until(lambda: "told to leave: the group has 20 s to save" in one.out)
    start = time.monotonic()
    one.process.terminate()
    assert one.end() == 143
    assert time.monotonic() - start < 3
    assert not (one.folder / "saved-worker 0").exists()


def test_who_does_not_leave_within_the_grace_period_is_ended_and_named(launched):
    one = launched("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); forever()", grace=0.7)
    wait_until(lambda: one.out.count("ready") == 2)
    start = time.monotonic()
    one.process.terminate()
    assert one.end() == 143
    assert 0.5 < time.monotonic() - start < 5
    assert "worker 0, worker 1 did not leave in time and is ended by SIGKILL" in one.out


def test_work_that_is_done_by_the_time_of_sigterm_is_done(launched):
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('ready'); forever()"
    one = launched(body)
    wait_until(lambda: one.out.count("ready") == 2)
    one.process.terminate()
    assert one.end() == 0


def test_a_killed_launcher_leaves_no_process_behind_not_even_a_grandchild(launched):
    body = """
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", str(folder)])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready")
if index == 1: os.kill(os.getpid(), signal.SIGSTOP)
forever()
"""
    one = launched(body)
    wait_until(lambda: one.out.count("ready") == 2)
    assert len(left_behind(one.folder)) == 5  # launcher, two members, two grandchildren
    one.process.kill()
    one.end()
    wait_until(lambda: left_behind(one.folder) == [], 5.0)


def test_a_caller_that_fails_ends_the_group(tmp_path):
    script = tmp_path / "member.py"
    script.write_text(PROLOGUE + "print('hello'); forever()")

    def emit(source, line):
        raise BrokenPipeError(f"{source} said {line}")

    with pytest.raises(BrokenPipeError, match="said hello"):
        run_group(
            [sys.executable, str(script), str(tmp_path)],
            2,
            max_restarts=3,
            grace_period_secs=1,
            log_folder=tmp_path / "logs",
            emit=emit,
        )
    assert left_behind(tmp_path) == []


def test_a_flood_without_newlines_is_cut_and_does_not_freeze_the_process(run):
    result = run("sys.stdout.write('x' * 300_000); sys.stdout.flush(); print('\\nend')", num_workers=1)
    assert result.exit_code == 0
    lines = [line for source, line in run.said if source == "worker 0"]
    assert max(map(len, lines)) <= 1 << 16
    assert sum(map(len, lines)) == 300_003
