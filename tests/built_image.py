"""The built image and the engine that runs it, for the tests of both.

TRIREME_IMAGE names another image than this version's CPU variant.
"""

import os
import subprocess
from importlib.metadata import version

import pytest


@pytest.fixture(scope="module")
def engine():
    """A client of the engine."""
    from pipelines.targets.containers import connect
    from trainer.errors import BadInput

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
