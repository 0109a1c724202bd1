"""What the pipeline costs over the same work in one Python process: the ratio of wall times, cold, in pairs.

    python benchmarks/pipeline_overhead.py --pairs 3

Each pair is a whole `trireme run` (a process a task, compiled with kfp) and one process that prepares, trains, evaluates,
checks, judges and pushes by the trainer's own functions, each from nothing: a new root and a new folder for TensorFlow
Datasets. The two take turns in going first, so that a machine that changes speed does not favour either.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

ONE_PROCESS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from pipelines.config import load_config
from trainer import tasks
from trainer.config import GroupConfig

config, root = load_config(Path(sys.argv[1])), Path(sys.argv[2])

def artifact(name):
    return SimpleNamespace(
        path=str(root / name), metadata={},
        log_metric=lambda *_: None, log_confusion_matrix=lambda *_: None, log_roc_curve=lambda *_: None,
    )

examples, model, evaluation, checked, verdict, report, summary, pushed = map(
    artifact, ("examples", "model", "evaluation", "checked", "verdict", "report.html", "summary.md", "pushed")
)
registry = str(root / "models")
tasks.prepare_data(config.data.to_json(), config.seed, str(root), "", examples)
tasks.train_model(config.train.to_json(), "{}", config.seed, config.name, str(root), examples, model)
tasks.evaluate_model(
    config.evaluate.to_json(), config.name, registry, examples, model, evaluation, artifact("m"), artifact("c")
)
tasks.check_serving(config.serving.to_json(), model, checked)
evaluate = config.evaluate.to_json()
assert tasks.judge_model(
    evaluate, config.name, str(root), "run", model, evaluation, checked, verdict, report, summary
)
tasks.push_model(
    config.push.to_json(), evaluate, config.name, registry, str(root), "run", examples, model, evaluation, checked,
    verdict, pushed,
)
"""


def seconds_of(command: list[str], folder: Path) -> float:
    """Wall time of a command that must succeed, with a folder of its own for TensorFlow Datasets."""
    started = time.perf_counter()
    environment = {**os.environ, "TFDS_DATA_DIR": str(folder / "tfds")}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--config", default="configs/digits.yaml")
    arguments = parser.parse_args()
    ratios = []
    for pair in range(arguments.pairs):
        with tempfile.TemporaryDirectory() as temporary:
            here = Path(temporary)
            commands = {
                "pipeline": [sys.executable, "-m", "pipelines.cli", "run", arguments.config, "--root", str(here / "a")],
                "one process": [sys.executable, "-c", ONE_PROCESS, arguments.config, str(here / "b")],
            }
            order = list(commands) if pair % 2 == 0 else list(reversed(commands))
            seconds = {}
            for name in order:
                (here / name).mkdir()
                seconds[name] = seconds_of(commands[name], here / name)
        ratios.append(seconds["pipeline"] / seconds["one process"])
        shown = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        print(f"pair {pair + 1}: {shown}, ratio {ratios[-1]:.2f}", flush=True)
    print(
        f"pipeline over one process: median ratio {statistics.median(ratios):.2f} of {len(ratios)} pairs (at most 1.6)"
    )


if __name__ == "__main__":
    main()
