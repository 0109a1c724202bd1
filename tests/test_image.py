"""The built image, run by a real Docker engine: `make image-test` builds it first.

TRIREME_IMAGE names another image than this version's CPU variant.
"""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import REPOSITORY

from pipelines.checks import check
from pipelines.config import Config
from pipelines.targets.containers import CODE_LABEL
from trainer.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED
from trainer.provenance import source

pytestmark = [pytest.mark.image, pytest.mark.slow]

HARDENED = [
    "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=10001", "--network=none",
]  # fmt: skip


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
        each
        for each in check(Config.model_validate({"name": "tiny", "cluster": {"image": image}}))
        if each.subject == "code"
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
    packages = {(part["name"], part["version"]) for part in debian["components"] if "arch=source" not in part["purl"]}
    installed = call("dpkg-query", "--show", "--showformat", "${Package}\t${Version}\n").stdout.splitlines()
    assert packages == {tuple(line.split("\t")) for line in installed}


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
        "name: tiny\nseed: 3\ntrain: {model: mlp, epochs: 100, checkpoint_every_steps: 20, steps_per_loop: 4}\n"
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
    again = call(*words, options=mounted)
    assert again.returncode == 0, again.stderr
    assert "resuming after step" in again.stdout
    assert (work / "model" / "saved_model").is_dir()
    assert (work / "model").stat().st_uid == 10001
