"""How two workers on a network compare with one, beside what a model of the all-reduce says; then the model for many workers.

    python benchmarks/scaling.py                 # as root on Linux: measures on virtual hosts, about three minutes
    python benchmarks/scaling.py --computed      # the table of docs/scaling.md only: nothing is measured

Weak scaling: each worker has the same number of examples a step, however many there are. Efficiency is the step's time of
one worker on one core over that of two, a core each, with one thread each. The model:

    step = T + 2 (N − 1) / N · bytes / bandwidth + collectives · latency

T is the step of two workers that do not talk to each other, which is what this machine's memory lets two cores do;
bandwidth and latency are measured on the same two hosts, the one by a transfer, the other by all-reduces of one number.
One alone, two apart and two together take turns in the same two processes, so that a busy machine disturbs all alike; what is
shown are medians of the rounds' ratios.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

RATES = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
CASES = {
    "mlp, 1.3 M": {"model": "mlp", "model_args": {"hidden_units": [1024, 512]}, "per_worker": 512},
    "cnn, 0.4 M": {"model": "cnn", "model_args": {}, "per_worker": 256},
}
STEPS_PER_CALL = 4
COLLECTIVES = 1 + 1 / STEPS_PER_CALL  # a step adds the gradients, packed together; a call the sums of the loss
SECONDS = 1.0  # of each turn
PORT = 2222

# What docs/scaling.md carries on. Bytes are those of float32 gradients, whatever the precision of the computation.
MODELS = {
    # name: (parameters, floating-point operations of one worker's step)
    "ResNet-50, 256 images": (25.6e6, 3 * 8.2e9 * 256),
    "BERT-base, 32 × 512 tokens": (110e6, 6 * 110e6 * 32 * 512),
    "1.3 B, 8 × 2048 tokens": (1.3e9, 6 * 1.3e9 * 8 * 2048),
}
DEVICE_FLOPS = 100e12  # what one worker's accelerator sustains
NETWORKS_GBIT = (10, 25, 100)
HOP_SECS = 150e-6  # of a hop of the ring over gRPC, between hosts of one zone


def main() -> None:
    """Prints the measured table and the computed one, and the former as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: %(default)s)")
    parser.add_argument("--only", choices=CASES, help="one case only")
    parser.add_argument("--bytes-per-pack", type=int, default=0, help="train.bytes_per_pack (default: %(default)s)")
    parser.add_argument("--computed", action="store_true", help="print the computed table only")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member:
        return _member(json.loads(arguments.member))
    if not arguments.computed:
        how = {"rounds": arguments.rounds, "bytes_per_pack": arguments.bytes_per_pack}
        _measured(how, [arguments.only] if arguments.only else list(CASES))
    _computed()
    return None


def _measured(how: dict, cases: list[str]) -> None:
    from virtual_network import missing

    if (reason := missing()) is not None:
        sys.exit(f"benchmarks/scaling.py: {reason}")
    found = []
    print(
        "case         link         bandwidth     latency   one        apart      together   efficiency  model   ratio"
    )
    for case in cases:
        for link in RATES:
            run = _pair(CASES[case] | how, RATES[link])
            found.append({"case": case, "link": link, **run})
            print(
                f"{case:<12} {link:<12} {run['bytes_per_sec'] * 8e-6:5.0f} Mbit/s {run['latency'] * 1e3:6.2f} ms"
                f" {run['one'] * 1e3:7.1f} ms {run['apart'] * 1e3:7.1f} ms {run['together'] * 1e3:7.1f} ms"
                f"   {run['efficiency']:5.2f}     {run['model']:5.2f}   {run['ratio']:5.2f}",
                flush=True,
            )
    print(json.dumps(found))


def _pair(case: dict, rate: str) -> dict[str, float]:
    """Two workers on two hosts: medians over the turns, in seconds a step."""
    from virtual_network import Network

    with tempfile.TemporaryDirectory() as folder, Network(folder) as network:
        hosts = [network.host([f"worker-{number}"]) for number in range(2)]
        for host in hosts:
            host.limit(rate, burst="256kb")
        bytes_per_sec = _bandwidth(hosts)
        turns = _run(case, hosts)
    for turn in turns:
        # 2 (N − 1) / N is 1 for two workers.
        talk = turn["bytes"] / bytes_per_sec + COLLECTIVES * turn["latency"]
        turn["efficiency"], turn["model"] = turn["one"] / turn["together"], turn["one"] / (turn["apart"] + talk)
        turn["ratio"] = turn["efficiency"] / turn["model"]
    return {"bytes_per_sec": bytes_per_sec, **{key: statistics.median(turn[key] for turn in turns) for key in turns[0]}}


def _run(case: dict, hosts: list) -> list[dict]:
    addresses = [f"worker-{number}:{PORT}" for number in range(len(hosts))]
    started = []
    for number, host in enumerate(hosts):
        task = {"type": "worker", "index": number}
        environ = {**os.environ, "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}
        log = host.network.folder / f"{number}.log"
        words = [sys.executable, str(Path(__file__).resolve()), "--member", json.dumps(case)]
        started.append((host.start(words, environ, f"worker-{number}", log, host.network.folder / "scratch"), log))
    codes = [process.wait() for process, _ in started]
    said = [log.read_text() for _, log in started]
    assert not any(codes), "\n".join(said)
    return json.loads(said[0].splitlines()[-1])


def _bandwidth(hosts: list) -> float:
    """Bytes a second that one host sends to the other, the time of the first ones, which a limit lets pass, left out."""
    import socket

    block, total, first = bytes(1 << 16), 1 << 23, 1 << 20
    arrived: list[float] = []
    with hosts[0].inside():
        server = socket.create_server((hosts[0].address, PORT))

    def receive() -> None:
        connection, _ = server.accept()
        with connection:
            count = 0
            while piece := connection.recv(1 << 16):
                count += len(piece)
                if count >= first and not arrived:
                    arrived.extend((time.perf_counter(), count))
            arrived.extend((time.perf_counter(), count))

    receiver = threading.Thread(target=receive)
    receiver.start()
    with hosts[1].inside(), server, socket.create_connection((hosts[0].address, PORT)) as connection:
        for _ in range(total // len(block)):
            connection.sendall(block)
        connection.close()
        receiver.join()
    return (arrived[3] - arrived[1]) / (arrived[2] - arrived[0])


def _member(case: dict) -> None:
    """One worker on one core; prints each turn's seconds a step, the seconds of a small all-reduce, the gradients' bytes."""
    from trainer.cluster import configure_collective_timeouts, describe

    description = describe(os.environ)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[description.task_index % len(cores)]})  # before TensorFlow counts its threads
    import numpy as np
    import tensorflow as tf

    from trainer.config import TrainConfig
    from trainer.consensus import Consensus
    from trainer.data.manifest import Feature, Label
    from trainer.data.reading import MemoryFeed
    from trainer.data.statistics import FeatureStatistics
    from trainer.models import build_model
    from trainer.objective import objective_of
    from trainer.rendezvous import wait_for_peers
    from trainer.spec import ModelSpec
    from trainer.step import Trainer
    from trainer.strategy import build_strategy

    label = Label(name="label", class_names=[str(digit) for digit in range(10)])
    features = {"image": Feature(kind="image", shape=(28, 28, 1))}
    spec = ModelSpec(features, label, {"label": FeatureStatistics(kind="category", num_examples=1)})
    random = np.random.default_rng(1)

    def trainer_of(strategy: object, batch: int) -> tuple[Trainer, MemoryFeed]:
        config = TrainConfig(model=case["model"], model_args=case["model_args"], global_batch_size=batch)
        images = random.integers(0, 256, (4 * batch, 28, 28, 1), np.uint8)
        feed = MemoryFeed(({"image": images}, random.integers(0, 10, 4 * batch).astype(np.int32)), 7, shuffle=True)
        trainer = Trainer(strategy, lambda: build_model(config, spec), config, objective_of(spec, config), 10_000)
        return trainer, feed

    wait_for_peers(description, 120)
    configure_collective_timeouts(description)
    strategy = build_strategy(TrainConfig(strategy="auto", bytes_per_pack=case["bytes_per_pack"]), description)
    consensus = Consensus(strategy, description)
    alone = trainer_of(tf.distribute.get_strategy(), case["per_worker"])
    together = trainer_of(strategy, case["per_worker"] * description.num_workers)

    def secs(pair: tuple[Trainer, MemoryFeed], num_steps: int) -> float:
        trainer, feed = pair
        began = time.perf_counter()
        for done in range(0, num_steps, STEPS_PER_CALL):
            trainer.train_steps(feed, None, 0, 0, min(STEPS_PER_CALL, num_steps - done))
        return (time.perf_counter() - began) / num_steps

    def mean(value: float) -> float:
        return consensus.add([value])[0] / description.num_workers

    def num_steps(pair: tuple[Trainer, MemoryFeed]) -> int:
        """The same on all workers: as many as one turn holds."""
        secs(pair, 1)  # compiles
        return max(2, round(SECONDS / mean(secs(pair, 2))))

    steps = [num_steps(alone), num_steps(together)]
    turns = []
    for _ in range(case["rounds"]):
        consensus.wait()
        one = secs(alone, steps[0]) if description.is_chief else 0.0
        consensus.wait()  # meanwhile the others were waiting here
        apart = mean(secs(alone, steps[0]))
        both = mean(secs(together, steps[1]))
        began = time.perf_counter()
        for _ in range(20):
            consensus.wait()
        latency = (time.perf_counter() - began) / 20
        num_bytes = 4 * together[0].model.count_params()
        turns.append({"one": one, "apart": apart, "together": both, "latency": latency, "bytes": num_bytes})
    print(json.dumps(turns), flush=True)


def _computed() -> None:
    """Weak-scaling efficiency by the model, for workers with one accelerator each."""
    print(
        f"\ncomputed, not measured: one worker sustains {DEVICE_FLOPS / 1e12:.0f} TFLOP/s, a hop takes {HOP_SECS * 1e6:.0f} µs"
    )
    print("model                        step     network      " + "".join(f"{n:>5} workers" for n in (8, 64, 512)))
    for name, (parameters, operations) in MODELS.items():
        step = operations / DEVICE_FLOPS
        for gbit in NETWORKS_GBIT:
            row = [efficiency(step, 4 * parameters, n, gbit * 1e9 / 8, HOP_SECS) for n in (8, 64, 512)]
            shown = "".join(f"{value:>13.2f}" for value in row)
            print(f"{name:<28} {step * 1e3:5.0f} ms  {gbit:>3} Gbit/s  {shown}")


def efficiency(step: float, num_bytes: float, workers: int, bytes_per_sec: float, hop: float) -> float:
    """One worker's step over that of a ring of many, nothing of which overlaps: 2 (N − 1) hops of 1/N of the bytes."""
    hops = 2 * (workers - 1)
    return step / (step + hops * (num_bytes / workers / bytes_per_sec + hop))


if __name__ == "__main__":
    main()
