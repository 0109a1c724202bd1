"""Images with class labels out of a TensorFlow Datasets builder, in an order that is always the same."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from trainer.config import DataConfig, suggestion
from trainer.errors import BadInput, WorldFailure
from trainer.progress import say


class TfdsSource:
    """A builder, prepared (downloaded if it must be), with the two features that a classifier needs.

    Attributes:
        splits: Split expression by name, `train`, `validation`, `test`.
        image_shape: Height, width and channels of every image.
        class_names: Names of the label's classes.

    Raises:
        BadInput: The builder, a feature or a split does not exist or does not fit.
        WorldFailure: The dataset could not be fetched.
    """

    def __init__(self, config: DataConfig) -> None:
        import tensorflow_datasets as tfds

        tfds.disable_progress_bar()
        self._tfds, self._config = tfds, config
        self._builder = _builder(config)
        self._fetch()
        wanted = config.splits
        self.splits = {"train": wanted.train}
        if wanted.validation is not None:
            self.splits["validation"] = wanted.validation
        self.splits["test"] = wanted.test
        self._choose_features()
        self._check_splits()

    def identity_fields(self) -> dict[str, str | int | None]:
        """Where the examples come from, for the manifest."""
        builder = self._builder
        return {
            "kind": "tfds",
            "name": builder.name,
            "config": builder.builder_config.name if builder.builder_config else None,
            "version": str(builder.version),
            **{f"split.{name}": expression for name, expression in self.splits.items()},
        }

    def identity(self) -> list[Any]:
        """What changes when the source's content does: name and version, sizes and shards of each split."""
        splits = self._builder.info.splits
        return [
            self.identity_fields(),
            sorted((name, info.num_bytes, list(info.shard_lengths)) for name, info in splits.items()),
        ]

    def num_examples(self, expression: str) -> int | None:
        """Examples of a split expression; None where the builder keeps no counts."""
        splits = self._builder.info.splits
        return splits[expression].num_examples if splits else None

    def examples(self, expression: str) -> Iterator[tuple[np.ndarray, int]]:
        """Image [height, width, channels] uint8 and class index, in the source's own order."""
        import tensorflow as tf

        # One file after another: only then does a part of a split hold the same examples as the whole has there.
        read_config = self._tfds.ReadConfig(interleave_cycle_length=1, add_tfds_id=False)
        dataset = self._builder.as_dataset(split=expression, shuffle_files=False, read_config=read_config)
        size = self._config.image_size

        def pick(example: dict[str, Any]) -> tuple[Any, Any]:
            image, label = example[self._image_key], example[self._label_key]
            if size is not None:
                resized = tf.image.resize(image, size, method="bilinear", antialias=True)
                image = tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)
            return image, label

        for image, label in (
            dataset.map(pick, num_parallel_calls=2, deterministic=True).prefetch(64).as_numpy_iterator()
        ):
            if image.shape != self.image_shape:
                raise BadInput(
                    f"data.image_size = null: images of {self._config.name} differ in size"
                    f" ({list(image.shape)} and {list(self.image_shape)}); give a height and a width"
                )
            yield image, int(label)

    def _fetch(self) -> None:
        tfds, builder = self._tfds, self._builder
        if builder.is_prepared():
            return
        if not self._config.download:
            raise BadInput(
                f"data.download = false: {builder.info.full_name} is not in {builder.data_dir};"
                " allow the download or point data.data_dir at a folder that has it"
            )
        say(f"fetching {builder.info.full_name} into {builder.data_dir}")
        try:
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        except OSError as error:  # requests' errors are OSErrors too
            raise WorldFailure(
                f"{builder.info.full_name} is not in {builder.data_dir} and could not be fetched: {_first_line(error)}."
                " Prepare it on a machine that reaches its source, or set data.data_dir to a folder that has it"
            ) from error

    def _choose_features(self) -> None:
        tfds, config, info = self._tfds, self._config, self._builder.info
        supervised = info.supervised_keys or (None, None)
        features = dict(info.features.items()) if hasattr(info.features, "items") else {}

        def choose(key: str | None, default: Any, setting: str) -> str:
            name = key if key is not None else default
            if not isinstance(name, str):
                raise BadInput(
                    f"data.{setting} = null: {config.name} names no supervised {setting[:-4]};"
                    f" choose one of {', '.join(sorted(features))}"
                )
            if name not in features:
                raise BadInput(
                    f"data.{setting} = {json.dumps(name)}: {config.name} has no such feature"
                    f" (it has {', '.join(sorted(features))})"
                )
            return name

        self._image_key = choose(config.image_key, supervised[0], "image_key")
        self._label_key = choose(config.label_key, supervised[1], "label_key")
        image, label = features[self._image_key], features[self._label_key]
        if not isinstance(image, tfds.features.Image) or np.dtype(image.np_dtype) != np.uint8:
            raise BadInput(
                f"data.image_key = {json.dumps(self._image_key)}: is {type(image).__name__} of"
                f" {np.dtype(image.np_dtype).name}, and an image of uint8 is needed"
            )
        if not isinstance(label, tfds.features.ClassLabel):
            raise BadInput(
                f"data.label_key = {json.dumps(self._label_key)}: is {type(label).__name__}, not a class label"
            )
        self.class_names = [str(name) for name in label.names]
        height, width, channels = image.shape
        if config.image_size is not None:
            height, width = config.image_size
        if None in (height, width, channels):
            raise BadInput(
                f"data.image_size = null: images of {config.name} have no fixed size; give a height and a width"
            )
        self.image_shape = (height, width, channels)

    def _check_splits(self) -> None:
        """Every split exists, fits, holds something and shares no example with another."""
        known = self._builder.info.splits
        if not known:  # the builder keeps no counts; what it gives is counted as it comes
            return
        ranges: dict[str, list[tuple[str, int, int]]] = {}
        for name, expression in self.splits.items():
            try:
                info = known[expression]
                ranges[name] = [
                    (
                        part.splitname,
                        part.from_ or 0,
                        known[part.splitname].num_examples if part.to is None else part.to,
                    )
                    for part in self._tfds.core.ReadInstruction.from_spec(expression).to_absolute(known)
                ]
                empty = info.num_examples <= 0
            except (ValueError, KeyError, AssertionError) as error:
                raise BadInput(
                    f"data.splits.{name} = {json.dumps(expression)}: {_first_line(error)}"
                    f" (splits of {self._config.name}: {', '.join(known) or 'none known'})"
                ) from None
            if empty:
                raise BadInput(f"data.splits.{name} = {json.dumps(expression)}: holds no examples")
        names = list(ranges)
        for i, name in enumerate(names):
            for other in names[:i]:
                for split, low, high in ranges[name]:
                    for other_split, other_low, other_high in ranges[other]:
                        if split == other_split and low < other_high and other_low < high:
                            shared = min(high, other_high) - max(low, other_low)
                            raise BadInput(
                                f"data.splits.{name} = {json.dumps(self.splits[name])}:"
                                f" shares {shared:,} examples of {split} with data.splits.{other}"
                            )


class BuilderDescription(NamedTuple):
    """What is known of a builder without its data."""

    full_name: str
    """Name, configuration and version."""
    folder: str
    """Where its data is or would be."""
    prepared: bool
    """Whether it is there."""


def describe_builder(config: DataConfig) -> BuilderDescription:
    """Looks a builder up. Raises BadInput where there is none."""
    builder = _builder(config)
    return BuilderDescription(builder.info.full_name, str(builder.data_dir), builder.is_prepared())


def _builder(config: DataConfig) -> Any:
    import tensorflow_datasets as tfds

    import trainer.data.digits  # noqa: F401 - registers the builder

    try:
        return tfds.builder(config.name, data_dir=config.data_dir)
    except tfds.core.DatasetNotFoundError:
        hint = suggestion(config.name.split("/")[0].split(":")[0], tfds.list_builders())
        raise BadInput(f"data.name = {json.dumps(config.name)}: no such dataset{hint}") from None
    except (ValueError, AssertionError) as error:  # unknown configuration or version
        raise BadInput(f"data.name = {json.dumps(config.name)}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
