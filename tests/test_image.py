"""The built image, run by a real Docker engine: `make image-test` builds it first.

TRIREME_IMAGE names another image than this version's CPU variant.
"""

import io
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import REPOSITORY

from pipelines.checks import check
from pipelines.config import Config
from pipelines.targets.containers import CODE_LABEL, RUN_LABEL, connect
from pipelines.targets.local import run
from pipelines.targets.output import Display
from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, BadInput
from trainer.provenance import source
from trainer.storage import list_names, read_json

pytestmark = [pytest.mark.image, pytest.mark.slow]

HARDENED = [
    "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=10001", "--network=none",
]  # fmt: skip
SMALL = {
    "name": "tiny",
    "seed": 3,
    "train": {"model": "mlp", "epochs": 2},
    "evaluate": {"thresholds": {"accuracy": {"value_threshold": 0.2}}},
}


@pytest.fixture(scope="module")
def engine():
    """A client of the engine."""
    try:
        client = connect()
    except BadInput as error:
        pytest.skip(str(error))
    yield client
    client.close()


@pytest.fixture(scope="module")
def image(engine):
    """The image's name."""
    name = os.environ.get("TRIREME_IMAGE", f"trireme:{version('trireme')}-cpu")
    if not any(name in found.tags for found in engine.images.list()):
        pytest.fail(f"the engine has no image {name}: make image VARIANT=cpu")
    return name


@pytest.fixture(scope="module")
def call(image):
    """`docker run` of the image."""

    def called(*words, options=()):
        return subprocess.run(
            ["docker", "run", "--rm", *options, image, *words], capture_output=True, text=True, timeout=300
        )

    return called


@pytest.fixture(scope="module")
def files(call):
    """Every file of the image: path → octal mode."""
    listed = call("find", "/", "-xdev", "-type", "f", "-printf", "%m %p\\n", options=["--user=0"])
    assert listed.returncode == 0, listed.stderr
    return {path: mode for mode, _, path in (line.partition(" ") for line in listed.stdout.splitlines())}


def test_the_image_holds_code_and_bytecode_and_nothing_to_build_or_test_with(files):
    rooms = {
        path.removeprefix("/opt/rooms/") for path in files if path.startswith("/opt/rooms/") and path.endswith(".py")
    }
    here = {
        str(path.relative_to(REPOSITORY))
        for room in ("trainer", "components", "pipelines")
        for path in (REPOSITORY / room).rglob("*.py")
    }
    assert rooms == here
    compiled = {path for path in files if path.endswith(".cpython-311.pyc")}
    for module in (
        "/opt/rooms/trainer/__pycache__/loop",
        "/opt/trireme/lib/python3.11/site-packages/keras/__pycache__/__init__",
    ):
        assert f"{module}.cpython-311.pyc" in compiled
    programs = {Path(path).name for path in files if "/bin/" in path or "/sbin/" in path}
    assert not programs & {"gcc", "cc", "g++", "clang", "ld", "strip", "make", "git"}
    unwanted = [
        path
        for path in files
        if any(part in path for part in ("/.git/", "/.cache/"))
        or (path.startswith("/opt/") and "/tests/" in path)
        or path.startswith(("/build/", "/work/", "/var/lib/apt/lists/deb"))
    ]
    assert unwanted == []


def test_nothing_of_the_image_can_be_changed_by_its_user(files):
    ours = {path: mode for path, mode in files.items() if path.startswith("/opt/")}
    assert len(ours) > 1000
    assert [path for path, mode in ours.items() if int(mode, 8) & 0o022] == []


def test_user_labels_and_variables(engine, image):
    settings = engine.images.get(image).attrs["Config"]
    assert settings["User"] == "10001"
    labels = settings["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.version"] == version("trireme")
    assert labels["org.opencontainers.image.source"].startswith("https://")
    assert len(labels["org.opencontainers.image.revision"].removesuffix("-modified")) == 40
    # Whatever else came in with a build would be a way for a secret to come in.
    assert {entry.partition("=")[0] for entry in settings["Env"]} <= {
        "PATH", "HOME", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "NVIDIA_DRIVER_CAPABILITIES", "TRIREME_REVISION",
        "LANG", "GPG_KEY", "PYTHON_VERSION", "PYTHON_SHA256", "PIP_CERT",  # of the image that it is built on
    }  # fmt: skip


def test_the_label_names_the_code_that_is_inside_and_check_compares_it(engine, image, call):
    inside = json.loads(
        call("python", "-c", "import json, trainer.provenance as p; print(json.dumps(p.source()))").stdout
    )
    labels = engine.images.get(image).labels
    assert inside["digest"] == labels[CODE_LABEL]
    assert inside["revision"] == labels["org.opencontainers.image.revision"]
    finding = next(
        each for each in check(Config.model_validate(SMALL | {"cluster": {"image": image}})) if each.subject == "code"
    )
    same = inside["digest"] == source()["digest"]
    assert finding.state == ("passed" if same else "warning")
    assert ("holds the code of this checkout" if same else "holds other code") in finding.message


def test_words_go_to_the_trainer_and_programs_are_left_alone(call):
    help_ = call("trainer", "--help")
    assert help_.returncode == 0
    assert "python -m trainer" in help_.stdout
    assert call().stdout == help_.stdout
    wrong = call("trian")
    assert wrong.returncode == EXIT_BAD_INPUT
    assert "invalid choice: 'trian'" in wrong.stderr
    absent = call("train", "absent.yaml", "--examples", "/opt", "--output", "there")
    assert absent.returncode == EXIT_BAD_INPUT
    assert "absent.yaml" in absent.stderr
    assert call("export").returncode == EXIT_BAD_INPUT  # a step without its arguments, and a word of the shell
    assert call("/bin/echo", "a").stdout == call("echo", "a").stdout == "a\n"
    # The way kfp starts a component.
    program = call("sh", "-ec", 'echo "$0|$1|$2"; exit 7', "first", "two words", "--third")
    assert (program.returncode, program.stdout) == (7, "first|two words|--third\n")


def test_a_bill_of_materials_lists_what_is_installed(call):
    python = json.loads(call("cat", "/opt/sbom/python.cdx.json").stdout)
    assert python["bomFormat"] == "CycloneDX"
    listed = {part["name"].lower().replace("_", "-"): part["version"] for part in python["components"]}
    assert listed["tensorflow-cpu"] == version("tensorflow-cpu")
    assert "pip" not in listed
    debian = json.loads(call("cat", "/opt/sbom/debian.cdx.json").stdout)
    assert "libc6" in {part["name"] for part in debian["components"]}


@pytest.fixture(scope="module")
def work(tmp_path_factory, digits_examples):
    """A folder that the image's user may write, with prepared digits and a configuration."""
    folder = tmp_path_factory.mktemp("work")
    folder.chmod(0o777)
    (folder / "examples").mkdir()
    for file in digits_examples.iterdir():
        (folder / "examples" / file.name).write_bytes(file.read_bytes())
    for parent in [folder, *folder.parents[:2]]:
        parent.chmod(parent.stat().st_mode | 0o711)
    (folder / "tiny.yaml").write_text(
        "name: tiny\nseed: 3\ntrain: {model: mlp, epochs: 400, checkpoint_every_steps: 20, steps_per_loop: 4}\n"
    )
    return folder


def test_a_hardened_training_is_stopped_by_sigterm_and_goes_on_in_the_next_container(engine, image, call, work):
    words = ["train", "/work/tiny.yaml", "--examples", "/work/examples", "--output", "/work/model"]
    mounted = [*HARDENED, f"--volume={work}:/work"]
    name = f"trireme-test-{os.getpid()}"
    first = subprocess.Popen(
        ["docker", "run", f"--name={name}", "--rm", *mounted, image, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = []
    for line in first.stdout:
        said.append(line)
        if line.startswith("epoch 2/"):
            subprocess.run(["docker", "kill", "--signal=TERM", name], check=True, capture_output=True)
            break
    said += first.stdout.readlines()
    first.stdout.close()
    assert first.wait(60) == EXIT_PREEMPTED, said
    assert "SIGTERM after step" in said[-1]
    assert not (work / "model").exists()
    again = call(*words, "--set", "train.epochs=400", options=mounted)
    assert again.returncode == 0, again.stderr
    assert "resuming after step" in again.stdout
    assert (work / "model" / "saved_model").is_dir()
    assert (work / "model").stat().st_uid == 10001


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The root of the runs in containers."""
    return tmp_path_factory.mktemp("root")


def in_containers(image, root, **changes):
    config = Config.model_validate(SMALL | {"cluster": {"image": image}} | changes)
    return run(config, root, "docker", Display(io.StringIO()))


def test_the_same_pipeline_gives_the_same_metrics_in_containers_whose_root_is_a_bucket(
    engine, image, call, tmp_path, gcs, monkeypatch
):
    here = run(Config.model_validate(SMALL), tmp_path / "root", "subprocess", Display(io.StringIO()))
    monkeypatch.chdir(tmp_path)  # what is worked on stands in output/ here
    there = in_containers(image, f"{gcs}/root")
    assert (here.exit_code, there.exit_code) == (0, 0), (here.message, there.message)
    assert there.document["verdict"] == here.document["verdict"] == "blessed"
    assert there.document["digests"]["examples"] == here.document["digests"]["examples"]
    for metric, value in here.document["metrics"]["test"].items():
        assert there.document["metrics"]["test"][metric] == pytest.approx(value, abs=1e-6), metric
    assert set(there.document["seconds"]) == set(here.document["seconds"])
    assert there.document["artifacts"]["pushed_model"].startswith(f"{gcs}/root/models")
    folder = f"{gcs}/root/runs/{Path(there.document['run_dir']).name}"
    assert read_json(f"{folder}/run.json")[0]["state"] == "succeeded"
    assert "saved_model/saved_model.pb" in list_names(f"{folder}/train-model/model")
    # The versions are those of the image, not of whoever started it.
    inside = call("python", "-c", "import json, trainer.provenance as p; print(json.dumps(p.provenance()))").stdout
    for part in ("versions", "source"):
        assert there.document[part] == json.loads(inside)[part]
    assert Path(there.document["artifacts"]["report"]).stat().st_uid == os.getuid()
    assert left(engine) == []


def test_ctrl_c_reaches_the_training_inside(engine, image, root, configuration):
    file = configuration(json.dumps(SMALL | {"train": {"model": "mlp", "epochs": 100_000, "steps_per_loop": 4}}))
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", "run", file, "--runner", "docker", "--root", root, "--json",
         "--set", f"cluster.image={image}"],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stderr:
        if "epoch 1/" in line:
            process.send_signal(2)
            break
    output, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED, errors
    assert "interrupted in train-model: SIGINT after step" in errors
    assert json.loads(output.splitlines()[-1])["state"] == "interrupted"
    assert list((root / "checkpoints").rglob("*.index"))
    assert left(engine) == []


def test_a_task_that_fails_inside_fails_the_run_with_its_own_words(image, root):
    outcome = in_containers(image, root, train={"model": "mlp", "global_batch_size": 5000})
    assert outcome.exit_code == EXIT_BAD_INPUT
    assert "task train-model failed: train.global_batch_size = 5000: the train split has" in outcome.message
    log = Path(outcome.document["run_dir"], "logs", "train-model.log").read_text()
    assert log.count("Executing task 'train-model'") == 1  # a person is looking: no pauses, no further tries


@pytest.mark.parametrize("program", ["false", "true"])
def test_a_container_that_ends_at_once_is_never_taken_for_a_success(engine, image, root, program):
    """kfp takes a container that is gone before its exit code is asked for to have succeeded, as `true` says it has."""
    recipe = io.BytesIO(f'FROM {image}\nENTRYPOINT ["{program}"]\n'.encode())
    hasty, _ = engine.images.build(fileobj=recipe, tag="trireme-hasty:test")
    try:
        outcome = in_containers("trireme-hasty:test", root)
    finally:
        engine.images.remove(hasty.id, force=True)
    assert outcome.exit_code == EXIT_FAILED
    assert "prepare-data ended without a word" in outcome.message
    assert outcome.document["state"] == "failed"


def test_gpus_that_the_engine_cannot_hand_out_are_refused_in_one_line(engine, image, root):
    if "nvidia" in engine.info()["Runtimes"]:
        pytest.skip("this engine hands out GPUs")
    started = time.monotonic()
    outcome = in_containers(image, root, cluster={"image": image, "accelerator": {"count": 1}})
    assert outcome.exit_code == EXIT_BAD_INPUT
    assert "cluster.accelerator" in outcome.message
    assert time.monotonic() - started < 60


def left(engine):
    """Containers of runs that are still there once the engine had time to remove what ended."""
    for _ in range(50):
        found = engine.containers.list(all=True, ignore_removed=True, filters={"label": RUN_LABEL})
        if not found:
            break
        time.sleep(0.1)
    return found
