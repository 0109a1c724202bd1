"""What the container costs: its size, its start, and a training's first step and epoch against those without a container.

    python benchmarks/container.py [IMAGE]

Both sides run in turn. Of a start the quickest counts, so that a busy machine matters less; of a training each pair is shown.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainer.config import DataConfig
from trainer.data.prepare import prepare

_ROUNDS = 3
_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "digits.yaml"
_SETTINGS = ["--set", "train.epochs=1", "--set", "train.steps_per_loop=1"]
_FIRST_STEP = '"task": "train-model", "done": 1,'


def main() -> None:
    """Measures and prints."""
    image = sys.argv[1] if len(sys.argv) > 1 else "trireme:0.1.0-cpu"
    size = int(_output(["docker", "image", "inspect", image, "--format", "{{.Size}}"]))
    print(f"size                         {size / 1e9:.2f} GB")
    docker = ["docker", "run", "--rm", "--network=none"]
    start, help_ = _quickest([*docker, image, "true"], [*docker, image, "trainer", "--help"])
    print(f"docker run … true            {start:.2f} s")
    print(f"docker run … trainer --help  {help_:.2f} s, of which python -m trainer {help_ - start:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        prepare(DataConfig(), seed=7, folder=Path(folder) / "examples")
        (Path(folder) / "digits.yaml").write_text(_CONFIG.read_text())
        inside = [*docker, "--user=0", "--env=TRIREME_EVENTS=1", f"--volume={folder}:{folder}", image]
        outside = [sys.executable, "-m", "trainer"]
        print("seconds from the command to …    the first step's end       the end of one epoch")
        print("                               outside  inside  ratio    outside  inside  ratio")
        first, whole = [], []
        for pair in range(_ROUNDS):
            here, there = (
                _training([*how, "train", f"{folder}/digits.yaml", "--examples", f"{folder}/examples", "--output",
                           f"{folder}/{pair}-{side}", *_SETTINGS])
                for side, how in enumerate((outside, inside))
            )  # fmt: skip
            first.append(there[0] / here[0])
            whole.append(there[1] / here[1])
            print(
                f"pair {pair + 1}                        "
                + "    ".join(f"{a:7.2f} {b:7.2f} {b / a:6.2f}" for a, b in zip(here, there, strict=True))
            )
        print(
            f"median ratio                 first step {statistics.median(first):.2f}, epoch {statistics.median(whole):.2f}"
        )


def _quickest(*commands: list[str]) -> list[float]:
    """The shortest time of each command in seconds, run in turn."""
    seconds = [float("inf")] * len(commands)
    for _ in range(_ROUNDS):
        for index, command in enumerate(commands):
            started = time.monotonic()
            _output(command)
            seconds[index] = min(seconds[index], time.monotonic() - started)
    return seconds


def _training(command: list[str]) -> tuple[float, float]:
    """Seconds from a command's start to the line that tells its first step's end, and to its own end."""
    started, first = time.monotonic(), None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"TRIREME_EVENTS": "1"}
    ) as process:
        for line in process.stdout or ():
            if first is None and _FIRST_STEP in line:
                first = time.monotonic() - started
    if process.returncode or first is None:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}, first step told: {first is not None}")
    return first, time.monotonic() - started


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]}: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
