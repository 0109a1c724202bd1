"""What can be known before a run is paid for, each finding with its remedy.

for finding in check(config):
    print(finding.state, finding.subject, finding.message)
"""

from typing import NamedTuple

from pipelines.config import Config


class Finding(NamedTuple):
    """One thing that was looked at."""

    state: str
    """`passed`, `warning` or `failed`."""
    subject: str
    """What was looked at."""
    message: str
    """What was found and, where it is not well, what to do."""


def check(config: Config) -> list[Finding]:
    """Looks at the dataset and the image of a configuration that is valid in itself."""
    return [
        Finding("passed", "configuration", f"{config.name}: every setting is valid and they fit one another"),
        _dataset(config),
        _image(config),
        _code(config),
    ]


def _dataset(config: Config) -> Finding:
    """Whether the builder or the files exist and are at hand; reads metadata only."""
    from trainer.data.files import count_files
    from trainer.data.tfds_source import describe_builder
    from trainer.errors import TriremeError

    try:
        if config.data.source != "tfds":
            return Finding(
                "passed", "dataset", f"{count_files(config.data):,} {config.data.source} files in {config.data.path}"
            )
        description = describe_builder(config.data)
    except TriremeError as error:
        return Finding("failed", "dataset", str(error))
    if not description.prepared and config.data.download:
        return Finding("warning", "dataset", f"{description.full_name} will be fetched into {description.folder}")
    if not description.prepared:
        return Finding(
            "failed", "dataset", f"{description.full_name} is not in {description.folder}; set data.download"
        )
    return Finding("passed", "dataset", f"{description.full_name} is in {description.folder}")


def _image(config: Config) -> Finding:
    image = config.cluster.image
    name, _, tag = image.rpartition("/")[2].partition(":")
    if "@sha256:" in image:
        return Finding("passed", "image", f"{image} is fixed by its digest")
    if tag in ("", "latest"):
        return Finding("failed", "image", f"cluster.image = {image}: names no fixed version; give a tag or a digest")
    return Finding("passed", "image", f"{name} has the tag {tag}")


def _code(config: Config) -> Finding:
    """Whether the image holds this checkout's code, where a Docker engine here has the image."""
    from trainer.errors import BadInput

    from pipelines.targets.containers import code_remark, connect, image_labels

    image = config.cluster.image
    try:
        labels = image_labels(connect(), image)
    except BadInput as error:
        return Finding("passed", "code", f"not compared with the image's: {error}")
    if labels is None:
        return Finding("passed", "code", f"not compared with the image's: the Docker engine here does not have {image}")
    if remark := code_remark(labels):
        return Finding("warning", "code", f"{image} {remark}")
    return Finding("passed", "code", f"{image} holds the code of this checkout")
