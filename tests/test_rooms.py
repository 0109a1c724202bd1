"""pipelines → components → trainer, and nothing heavy where it is not needed: looked at in fresh processes."""

import pkgutil
import subprocess
import sys

import pytest
from conftest import REPOSITORY


def loaded_after(code):
    """Top-level modules that are loaded after the code ran in a fresh process."""
    script = f"{code}\nimport sys\nprint('\\n'.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def modules_of(room):
    return [
        module.name
        for module in pkgutil.walk_packages([str(REPOSITORY / room)], prefix=f"{room}.")
        if not module.name.endswith("__main__")
    ]


def test_no_module_of_the_trainer_loads_kfp_or_another_room():
    loaded = loaded_after("\n".join(f"import {name}" for name in modules_of("trainer")))
    assert "trainer" in loaded
    assert not loaded & {"kfp", "components", "pipelines"}


def test_components_load_neither_tensorflow_nor_the_pipelines():
    loaded = loaded_after("\n".join(f"import {name}" for name in modules_of("components")))
    assert {"kfp", "components"} <= loaded
    assert not loaded & {"tensorflow", "keras", "pipelines"}


def test_compiling_loads_no_tensorflow(tmp_path):
    loaded = loaded_after(
        f"from pipelines.cli import main; main(['compile', 'configs/digits.yaml', '-o', {str(tmp_path / 'p.yaml')!r}])"
    )
    assert "kfp" in loaded
    assert not loaded & {"tensorflow", "keras", "tensorflow_datasets"}


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]])
def test_help_loads_neither_kfp_nor_tensorflow(words):
    loaded = loaded_after(
        f"import contextlib\nfrom pipelines.cli import main\nwith contextlib.suppress(SystemExit): main({words!r})"
    )
    assert "pipelines" in loaded
    assert not loaded & {"tensorflow", "keras", "kfp", "tensorflow_datasets", "google", "numpy", "pydantic"}


def test_validating_a_configuration_loads_neither_kfp_nor_tensorflow():
    loaded = loaded_after(
        "from pathlib import Path\nfrom pipelines.config import load_config\nload_config(Path('configs/digits.yaml'))"
    )
    assert not loaded & {"tensorflow", "keras", "kfp", "tensorflow_datasets"}
