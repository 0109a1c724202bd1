"""`data.source` → the source."""

from pathlib import Path

from trainer.config import DataConfig
from trainer.data.source import Source
from trainer.errors import BadInput


def open_source(config: DataConfig, local: Path | None = None, *, fetch: bool = True) -> Source:
    """Looks at the source that the data section names.

    Args:
        config: The data section.
        local: Folder in which `data.path` was staged, where that is in a bucket.
        fetch: Whether a dataset that is not at hand may be downloaded.

    Raises:
        BadInput: It does not exist or does not fit the configuration.
        WorldFailure: It could not be fetched.
    """
    source = _opened(config, local, fetch)
    if config.image_size is not None and all(feature.kind != "image" for feature in source.features.values()):
        raise BadInput(f"data.image_size = {list(config.image_size)}: no feature is an image")
    return source


def _opened(config: DataConfig, local: Path | None, fetch: bool) -> Source:
    if config.source == "tfds":
        from trainer.data.tfds_source import TfdsSource

        return TfdsSource(config, fetch=fetch)
    if config.source == "image_folder":
        from trainer.data.image_folder import ImageFolderSource

        return ImageFolderSource(config, local)
    if config.source == "tfrecord":
        from trainer.data.tfrecord_source import TfrecordSource

        return TfrecordSource(config, local)
    from trainer.data.tables import TableSource

    return TableSource(config, local)
