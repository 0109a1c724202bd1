"""What the container costs: its size, its start, and a short training against the same one without a container.

    python benchmarks/container.py [IMAGE]

Both sides run in turn, and the quickest of each counts, so that a busy machine matters less.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainer.config import DataConfig
from trainer.data.prepare import prepare

_ROUNDS = 5
_STEPS = ["--set", "train.epochs=1", "--set", "train.model=mlp", "--set", "train.steps_per_loop=1"]
_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "digits.yaml"


def main() -> None:
    """Measures and prints."""
    image = sys.argv[1] if len(sys.argv) > 1 else "trireme:0.1.0-cpu"
    size = int(_output(["docker", "image", "inspect", image, "--format", "{{.Size}}"]))
    print(f"size                        {size / 1e9:.2f} GB")
    docker = ["docker", "run", "--rm", "--network=none"]
    start, help_ = _quickest([*docker, image, "true"], [*docker, image, "trainer", "--help"])
    print(f"start of a container        {start:.2f} s")
    print(f"docker run … trainer --help {help_:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        work.chmod(0o777)
        prepare(DataConfig(), seed=7, folder=work / "examples")
        (work / "digits.yaml").write_text(_CONFIG.read_text())
        inside = [*docker, "--user=0", f"--volume={work}:{work}", image]
        outside = [sys.executable, "-m", "trainer"]
        here, there = _quickest(
            *(
                [
                    *how,
                    "train",
                    f"{work}/digits.yaml",
                    "--examples",
                    f"{work}/examples",
                    "--output",
                    f"{work}/NEW",
                    *_STEPS,
                ]
                for how in (outside, inside)
            )
        )
    print(f"one epoch, no container     {here:.2f} s")
    print(f"one epoch, in a container   {there:.2f} s")
    print(f"ratio                       {there / here:.2f}")


def _quickest(*commands: list[str]) -> list[float]:
    """The shortest time of each command, run in turn. A word that ends in NEW names a folder that is new each time."""
    seconds = [float("inf")] * len(commands)
    for attempt in range(_ROUNDS):
        for index, command in enumerate(commands):
            words = [word.replace("/NEW", f"/{index}-{attempt}") for word in command]
            started = time.monotonic()
            _output(words)
            seconds[index] = min(seconds[index], time.monotonic() - started)
    return seconds


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]}: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
