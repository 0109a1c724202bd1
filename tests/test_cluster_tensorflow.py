"""The promises of the cluster with real TensorFlow processes: a lost worker ends the group in time, with its name."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lean_start import lean_path

from tests.test_rendezvous import free_addresses
from trainer.launch.local import run_group

pytestmark = pytest.mark.slow

MEMBER = f"""
import os, pathlib, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from trainer.cluster import configure_collective_timeouts, describe, explain_lost_peer
from trainer.rendezvous import wait_for_peers
folder = pathlib.Path(sys.argv[1])
description = describe(os.environ)
me = description.name
import tensorflow as tf
wait_for_peers(description, 60)
"""

SYNCHRONOUS = (
    MEMBER
    + """
configure_collective_timeouts(description)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
@tf.function
def step(x):
    return strategy.reduce("SUM", strategy.run(lambda v: v, args=(x,)), axis=None)
mark = folder / f"{me}.saved"  # stands for a checkpoint
done = int(mark.read_text()) if mark.exists() else 0
try:
    while done < 200:
        assert float(step(tf.constant(1.0))) == 2.0
        done += 1
        if done == 20:
            mark.write_text(str(done))
            print("training", os.getpid(), flush=True)
        time.sleep(0.05)
except Exception as error:
    raise explain_lost_peer(error, description) or error from None
print("done", flush=True)
"""
)


def start(folder, addresses, index):
    script = folder / "member.py"
    script.write_text(SYNCHRONOUS)
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    environ = dict(os.environ, TF_CONFIG=json.dumps(config), TF_CPP_MIN_LOG_LEVEL="2", PYTHONPATH=lean_path(folder))
    with (folder / f"{index}.log").open("w") as log:
        return subprocess.Popen([sys.executable, str(script), str(folder)], env=environ, stdout=log, stderr=log)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_killed_or_frozen_ends_the_other_within_15_s_with_its_name(tmp_path, number, lost):
    addresses = free_addresses(2)
    processes = [start(tmp_path, addresses, i) for i in (0, 1)]
    try:
        end = time.monotonic() + 120
        while not all("training" in (tmp_path / f"{i}.log").read_text() for i in (0, 1)):
            assert all(process.poll() is None for process in processes), (tmp_path / "0.log").read_text()[-3000:]
            assert time.monotonic() < end
            time.sleep(0.1)
        processes[lost].send_signal(number)
        assert processes[1 - lost].wait(15) == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()
    survivor = (tmp_path / f"{1 - lost}.log").read_text()
    assert f"worker {1 - lost} lost its peer: worker {lost} ({addresses[lost]}) has died or stopped" in survivor


def run(folder, body, react, *args, **more):
    script = folder / "member.py"
    script.write_text(body)
    said = []

    def emit(source, line):
        said.append((source, line))
        react(source, line, said)

    result = run_group(
        [sys.executable, str(script), str(folder)],
        *args,
        grace_period_secs=5,
        log_folder=folder / "logs",
        emit=emit,
        environ=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="2", PYTHONPATH=lean_path(folder)),
        **more,
    )
    return result, said


def test_a_group_with_a_frozen_worker_is_started_again_and_finishes(tmp_path):
    frozen = []

    def freeze(source, line, said):
        if source == "worker 1" and line.startswith("training") and not frozen:
            frozen.append(time.monotonic())
            os.kill(int(line.split()[1]), signal.SIGSTOP)
        elif source == "launcher" and len(frozen) == 1:
            frozen.append(time.monotonic())

    result, said = run(tmp_path, SYNCHRONOUS, freeze, 2, max_restarts=1)
    assert (result.exit_code, result.restarts) == (0, 1), said[-30:]
    assert ("launcher", "worker 1 stopped answering; starting the whole group again (1 of 1)") in said
    assert frozen[1] - frozen[0] < 20  # 15 s, and the time for a fault to show after its echo
    assert said.count(("worker 0", "done")) == said.count(("worker 1", "done")) == 1


PARAMETER_SERVER = (
    MEMBER
    + """
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if description.task_type != "chief":
    server = tf.distribute.Server(resolver.cluster_spec(), description.task_type, description.task_index, "grpc")
    print("serving", os.getpid(), flush=True)
    server.join()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
def leave(*error):  # the coordinator's destructor waits for a lost worker for ever, as python -m trainer knows
    sys.__excepthook__(*error)
    os._exit(1)
sys.excepthook = leave
with strategy.scope():
    total = tf.Variable(0.0)
@tf.function
def step():
    strategy.run(lambda: total.assign_add(1.0))
for i in range(60):
    coordinator.schedule(step)
    if i == 20:
        coordinator.join()
        print("training", flush=True)
    if i == 40:  # a worker that was lost has the time to come back
        while pathlib.Path(sys.argv[1], "lost").exists():
            time.sleep(0.1)
    time.sleep(0.1)
coordinator.join()
print("total", float(total), flush=True)
os._exit(0)
"""
)


@pytest.mark.parametrize(("victim", "restarts"), [("worker 1", 0), ("parameter server 0", 1)])
def test_parameter_servers_outlive_a_worker_and_start_again_after_a_lost_server(tmp_path, victim, restarts):
    killed = []

    def kill(source, line, said):
        if (source, line) == ("chief", "training") and not killed:
            served = [line for source, line in said if source == victim and line.startswith("serving")]
            killed.append(int(served[0].split()[1]))
            if restarts == 0:
                (tmp_path / "lost").touch()
            os.kill(killed[0], signal.SIGKILL)
        elif source == victim and line.startswith("serving") and killed:
            (tmp_path / "lost").unlink(missing_ok=True)

    result, said = run(tmp_path, PARAMETER_SERVER, kill, 2, 1, max_restarts=1)
    assert (result.exit_code, result.restarts) == (0, restarts), said[-30:]
    assert ("chief", "total 60.0") in said
    assert len([1 for source, line in said if source == victim and line.startswith("serving")]) == 2
    assert next(line for source, line in said if source == "launcher").startswith(f"{victim} was ended by SIGKILL")
