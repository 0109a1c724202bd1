"""Examples out of a TensorFlow Datasets builder, in an order that is always the same."""

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer import storage
from trainer.config import DataConfig, suggestion
from trainer.data.manifest import Feature
from trainer.data.pictures import decode_columns
from trainer.data.shard_files import cache_folder
from trainer.data.source import BadRecord, Chunk, Part, plain_names
from trainer.errors import BadInput, WorldFailure
from trainer.own_code import fault_of, own_function
from trainer.progress import say
from trainer.storage.errors import unreachable

_CHUNK = 128
_PART_EXAMPLES = 65_536
_DOWNLOAD_RETRIES = (
    7  # with doubling pauses, 25 s; the library's ten take over three minutes to find that there is no network
)


class TfdsSource:
    """A builder, prepared (downloaded if it must be), with the features that are asked for.

    Args:
        config: The data section.
        fetch: Whether what is not there may be downloaded.

    Raises:
        BadInput: The builder, a feature or a split does not exist or does not fit.
        WorldFailure: The dataset could not be fetched.
    """

    def __init__(self, config: DataConfig, *, fetch: bool = True) -> None:
        import tensorflow_datasets as tfds

        tfds.disable_progress_bar()
        self._tfds, self._config = tfds, config
        self._builder, there = _open_builder(config, stage_it=fetch)
        if fetch:
            self._fetch(there)
        wanted = config.splits
        self.splits = {"train": wanted.train}
        if wanted.validation is not None:
            self.splits["validation"] = wanted.validation
        self.splits["test"] = wanted.test
        self._choose_features()
        self._check_splits()
        self.parts = [part for name in self.splits for part in self._parts_of(name)]

    def description(self) -> dict[str, str | int | None]:
        """Where the examples come from, for the manifest."""
        builder = self._builder
        return {
            "kind": "tfds",
            "name": builder.name,
            "config": builder.builder_config.name if builder.builder_config else None,
            "version": str(builder.version),
            **{f"split.{name}": expression for name, expression in self.splits.items()},
        }

    def identity(self) -> dict[str, Any]:
        """What changes when the source's content does: name and version, sizes and shards of each split."""
        splits = self._builder.info.splits
        sizes = {name: [info.num_bytes, list(info.shard_lengths)] for name, info in splits.items()}
        return {**self.description(), "sizes": sizes}

    def read(self, part: Part) -> Iterator[Chunk]:
        """The examples of a part, in the source's own order."""
        import tensorflow as tf

        # One file after another: only then does a part of a split hold the same examples as the whole has there.
        read_config = self._tfds.ReadConfig(interleave_cycle_length=1, add_tfds_id=False)
        instruction = part.place[0]
        if len(part.place) == 3:
            split, low, high = part.place
            instruction = self._tfds.core.ReadInstruction(split, from_=low, to=high, unit="abs")
        dataset = self._builder.as_dataset(
            split=instruction, shuffle_files=False, read_config=read_config, decoders=self._decoders()
        )
        size = self._config.image_size
        wanted = {**self._paths, self.label_name: self._label_path}
        if self._weight_path:
            wanted["\0weight"] = self._weight_path

        def pick(example: dict[str, Any]) -> dict[str, Any]:
            found = {name: _at(example, path) for name, path in wanted.items()}
            for name, feature in self.features.items():
                if feature.kind == "image" and size is not None and name not in self._files:
                    resized = tf.image.resize(found[name], size, method="bilinear", antialias=True)
                    found[name] = tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)
            return found

        batches = dataset.map(pick, num_parallel_calls=2, deterministic=True).batch(_CHUNK).prefetch(4)
        row = 0
        for batch in batches.as_numpy_iterator():
            files = {name: batch[name] for name in self._files}
            pixels, _, undecoded = decode_columns(files, self._files, resize=size is not None)
            batch |= pixels
            faults = sorted((self._faults(batch) | undecoded).items())
            bad = [BadRecord(f"{self._config.subject}[{part.place[0]}]", row + place + 1, why) for place, why in faults]
            row += len(batch[self.label_name])
            if faults:
                kept = np.setdiff1d(np.arange(len(batch[self.label_name])), [place for place, _ in faults])
                batch = {name: values[kept] for name, values in batch.items()}
            weights = batch.pop("\0weight").astype(np.float32) if self._weight_path else None
            labels = batch.pop(self.label_name)
            columns = {name: self._column(name, values) for name, values in batch.items()}
            yield Chunk(columns, self._labels(labels), weights, bad=bad)

    def _decoders(self) -> dict[str, Any]:
        """Leaves the images that are decoded here as the files that they are, in the builder's own tree."""
        found: dict[str, Any] = {}
        for name in self._files:
            *outer, last = self._paths[name].split("/")
            inner = found
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = self._tfds.decode.SkipDecoding()
        return found

    def _faults(self, batch: dict[str, np.ndarray]) -> dict[int, str]:
        """Fault by place in the batch of the examples that cannot be used."""
        found: dict[int, str] = {}
        for name, feature in self.features.items():
            if feature.kind == "number" and batch[name].dtype.kind == "f":
                infinite = np.isinf(batch[name].reshape(len(batch[name]), -1)).any(axis=1)
                found |= dict.fromkeys(np.flatnonzero(infinite).tolist(), f"{name} is not finite")
        label = batch[self.label_name]
        if label.dtype.kind == "f":
            found |= dict.fromkeys(
                np.flatnonzero(~np.isfinite(label)).tolist(), f"the label {self.label_name} is missing"
            )
        elif self.class_names is not None:
            found |= dict.fromkeys(np.flatnonzero(label < 0).tolist(), f"the label {self.label_name} is missing")
        if self._weight_path:
            weights = batch["\0weight"].astype(np.float64)
            unusable = ~(np.isfinite(weights) & (weights >= 0))
            found |= dict.fromkeys(np.flatnonzero(unusable).tolist(), f"the weight {self.weight_name} is no weight")
        return found

    def _column(self, name: str, values: np.ndarray) -> Any:
        feature = self.features[name]
        if feature.kind == "image":
            return values
        if feature.kind == "number":
            return values.astype(np.float32)
        if (names := self._category_names.get(name)) is not None:
            return [names[value] if value >= 0 else "" for value in values]
        return [_text(value) for value in values]

    def _labels(self, values: np.ndarray) -> list[Any]:
        if not self.is_classification:
            return values.astype(np.float32).astype(float).tolist()
        if self.class_names is not None:
            return [self.class_names[value] for value in values]
        return [_text(value) for value in values.tolist()]

    def _parts_of(self, name: str) -> Iterator[Part]:
        if self._ranges is None:
            yield Part(name, [self.splits[name]], None, 0)
            return
        for split, low, high in self._ranges[name]:
            info = self._builder.info.splits[split]
            size = info.num_bytes // max(1, info.num_examples)
            for start in range(low, high, _PART_EXAMPLES):
                end = min(start + _PART_EXAMPLES, high)
                yield Part(name, [split, start, end], end - start, (end - start) * size)

    def _fetch(self, there: str) -> None:
        """Has the builder prepared; `there` is where, or in which bucket."""
        tfds, builder = self._tfds, self._builder
        if builder.is_prepared():
            return
        if not self._config.download:
            raise BadInput(
                f"data.download = false: {builder.info.full_name} is not in {there};"
                " allow the download or point data.data_dir at a folder that has it"
            )
        say(f"fetching {builder.info.full_name} into {there}")
        from tensorflow_datasets.core.download import downloader

        downloader.MAX_RETRIES = _DOWNLOAD_RETRIES
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # a page of text for each retry
        try:
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        except OSError as error:  # requests' errors are OSErrors too
            reason = unreachable(error) or _first_line(error)
            raise WorldFailure(
                f"{builder.info.full_name} is not in {there} and could not be fetched: {reason}."
                " Prepare it on a machine that reaches its source, or set data.data_dir to a folder that has it"
            ) from error
        if storage.is_remote(there):
            storage.publish(Path(builder.data_dir), there)

    def _choose_features(self) -> None:
        config, info = self._config, self._builder.info
        known = dict(_leaves(info.features))
        supervised = info.supervised_keys or (None, None)
        inputs = config.input_keys
        if inputs is None:
            inputs = _named(supervised[0])
            if not inputs:
                raise BadInput(
                    f"data.input_keys = null: {config.name} names no supervised input; choose among {_listed(known)}"
                )
        label = config.label_key
        if label is None:
            if not isinstance(supervised[1], str):
                raise BadInput(
                    f"data.label_key = null: {config.name} names no supervised label; choose one of {_listed(known)}"
                )
            label = supervised[1]
        weights = [config.weight_key] if config.weight_key else []
        plain = plain_names([*dict.fromkeys([*inputs, label, *weights])], "data.input_keys")
        for setting, keys in (("input_keys", inputs), ("label_key", [label]), ("weight_key", [config.weight_key])):
            for key in keys:
                if key is not None and key not in known:
                    raise BadInput(
                        f"data.{setting} = {json.dumps(key)}: {config.name} has no such feature (it has {_listed(known)})"
                    )
        if label in inputs:
            raise BadInput(f"data.label_key = {json.dumps(label)}: is an input too, and the model would only copy it")
        for key in config.kinds:
            if key not in inputs:
                raise BadInput(f"data.kinds.{key}: is no input (inputs: {', '.join(inputs)})")
        self._paths = {plain[key]: key for key in inputs}
        self._category_names: dict[str, list[str] | None] = {}
        self.features = {plain[key]: self._feature(key, plain[key], known[key]) for key in inputs}
        # Decoded as the exported model will decode what it is sent, and not as the builder would.
        images = {name: feature.shape for name, feature in self.features.items() if feature.kind == "image"}
        self._files = {name: shape for name, shape in images.items() if shape[-1] in (1, 3)}
        self.label_name, self._label_path = plain[label], label
        self._weight_path = config.weight_key
        self.weight_name = plain[config.weight_key] if config.weight_key else None
        if config.weight_key is not None and not self._is_number(known[config.weight_key], scalar=True):
            raise BadInput(f"data.weight_key = {json.dumps(config.weight_key)}: is not a single number")
        self._choose_label(label, known[label])

    def _feature(self, key: str, name: str, feature: Any) -> Feature:
        tfds, config = self._tfds, self._config
        wanted = config.kinds.get(key)
        if isinstance(feature, tfds.features.Image) and feature.np_dtype == np.uint8 and len(feature.shape) == 3:
            if wanted not in (None, "image"):
                raise BadInput(f"data.kinds.{key} = {json.dumps(wanted)}: is an image")
            return Feature(kind="image", shape=self._image_shape(feature))
        is_text = feature.np_dtype in (object, np.str_) or np.dtype(feature.np_dtype).kind in "OSU"
        is_class = isinstance(feature, tfds.features.ClassLabel)
        if is_class or (is_text and feature.shape == ()):
            kind = wanted or ("text" if isinstance(feature, tfds.features.Text) else "category")
            if kind in ("category", "text"):
                if is_class:
                    self._category_names[name] = [str(one) for one in feature.names]
                return Feature(kind=kind)
        elif self._is_number(feature) and wanted in (None, "number"):
            return Feature(kind="number", shape=feature.shape)
        elif self._is_number(feature, scalar=True) and wanted == "category":
            return Feature(kind="category")
        raise BadInput(
            f"data.input_keys = {json.dumps(key)}: {type(feature).__name__} {list(feature.shape or ())} of"
            f" {np.dtype(feature.np_dtype).name} cannot be taken for"
            f" {wanted or 'an image of uint8, a number of fixed shape, a category or a text'}"
        )

    def _image_shape(self, feature: Any) -> tuple[int, ...]:
        height, width, channels = feature.shape
        if self._config.image_size is not None:
            height, width = self._config.image_size
        if None in (height, width, channels):
            raise BadInput(
                f"data.image_size = null: images of {self._config.name} have no fixed size; give a height and a width"
            )
        return height, width, channels

    def _is_number(self, feature: Any, *, scalar: bool = False) -> bool:
        plain = isinstance(feature, self._tfds.features.Tensor) and np.dtype(feature.np_dtype).kind in "iufb"
        return plain and None not in feature.shape and (not scalar or feature.shape == ())

    def _choose_label(self, key: str, feature: Any) -> None:
        """The label's type decides: classes where it has names or is text or bool, else a number."""
        self.class_names = None
        is_class = isinstance(feature, self._tfds.features.ClassLabel)
        kind = np.dtype(feature.np_dtype).kind if feature.shape == () else "none"
        if not is_class and kind not in "iufbOSU":
            raise BadInput(
                f"data.label_key = {json.dumps(key)}: is {type(feature).__name__}, neither a class nor a number"
            )
        self.is_classification = self._config.task == "classification" or (
            self._config.task is None and (is_class or kind in "bOSU")
        )
        if not self.is_classification and (is_class or kind not in "iufb"):
            raise BadInput(f"data.task = {json.dumps(self._config.task)}: the label {key} is not a number")
        if is_class:
            self.class_names = [str(name) for name in feature.names]

    def _check_splits(self) -> None:
        """Every split exists, fits, holds something and shares no example with another."""
        known = self._builder.info.splits
        self._ranges: dict[str, list[tuple[str, int, int]]] | None = None
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
        self._ranges = ranges
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
    builder, there = _open_builder(config, stage_it=False)
    prepared = storage.exists(there) if storage.is_remote(there) else builder.is_prepared()
    return BuilderDescription(builder.info.full_name, there, prepared)


def _open_builder(config: DataConfig, *, stage_it: bool) -> tuple[Any, str]:
    """The builder, and where its data is or would be; of a bucket's, a copy on this machine stands for it.

    The copy is kept, so that another preparation brings what changed and no more. Storage brings it, not TensorFlow's own
    reader: so it is checked, and an emulator's is found too.
    """
    place = config.path or config.data_dir
    if place is None or not storage.is_remote(place):
        builder = _builder(config)
        return builder, str(builder.data_dir)
    key = hashlib.sha256(place.rstrip("/").encode()).hexdigest()[:16]
    local = cache_folder().with_name("tfds") / key
    if config.path is not None:
        local = local.joinpath(
            *config.path.rstrip("/").split("/")[-3:]
        )  # the builder looks at name, configuration and version
        if stage_it or not local.exists():
            try:
                storage.stage(config.path, local)
            except storage.NotFound:
                raise BadInput(f"data.path = {json.dumps(config.path)}: holds nothing") from None
        return _builder(config.model_copy(update={"path": str(local)})), config.path
    if stage_it and not config.name.partition(":")[2].isidentifier():
        # What builders say of themselves, so that those whose version only the bucket knows are found.
        base = storage.join(config.data_dir, config.name.partition("/")[0].partition(":")[0])
        if described := [name for name in storage.list_names(base) if name.endswith(".json")]:
            storage.stage(base, local / base.rpartition("/")[2], described)
    here = config.model_copy(update={"data_dir": str(local)})
    builder = _builder(here)
    below = Path(builder.data_dir).relative_to(local)
    there = storage.join(config.data_dir, *below.parts)
    if stage_it and storage.exists(there):
        storage.stage(there, local / below)
        builder = _builder(here)  # it looks at its folder when it is made
    return builder, there


def _builder(config: DataConfig) -> Any:
    import tensorflow_datasets as tfds

    import trainer.data.digits
    import trainer.data.samples  # noqa: F401 - registers its builders, as the line above does

    if config.path is not None:
        try:
            return tfds.builder_from_directory(config.path)
        except Exception as error:
            raise BadInput(
                f"data.path = {json.dumps(config.path)}: is no folder of a prepared builder: {_first_line(error)}"
            ) from None
    if config.name.partition(":")[2].isidentifier():
        kind = find_own_builder(config.name)
        try:
            return kind(data_dir=config.data_dir)
        except OSError:  # the world's: a full disk, a folder that cannot be written
            raise
        except Exception as error:
            raise BadInput(f"data.name = {json.dumps(config.name)}: cannot be made: {fault_of(error)}") from error
    try:
        return tfds.builder(config.name, data_dir=config.data_dir)
    except tfds.core.DatasetNotFoundError:
        hint = suggestion(config.name.split("/")[0].split(":")[0], tfds.list_builders())
        raise BadInput(f"data.name = {json.dumps(config.name)}: no such dataset{hint}") from None
    except (ValueError, AssertionError) as error:  # unknown configuration or version
        rule = _first_line(error).rpartition('}": ')[2]  # behind how the builder was asked for
        wanted = config.name.partition(":")[0].partition("/")[2]
        known = list(tfds.builder_cls(config.name.partition("/")[0].partition(":")[0]).builder_configs)
        if wanted and wanted not in known:
            rule = f"has no configuration {wanted}" + (suggestion(wanted, known) or f" (it has {_some(known)})")
        raise BadInput(f"data.name = {json.dumps(config.name)}: {rule}") from None


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}" or "none"


def find_own_builder(name: str) -> type:
    """The builder class that `package.module:Class` names. Raises BadInput where there is none."""
    import tensorflow_datasets as tfds

    found = own_function(name, setting="data.name")
    if not (isinstance(found, type) and issubclass(found, tfds.core.DatasetBuilder)):
        module, _, kind = name.partition(":")
        raise BadInput(f"data.name = {json.dumps(name)}: {module} has no dataset builder {kind}")
    return found


def _leaves(features: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Features by path; those of a nested dictionary as `outer/inner`."""
    if not hasattr(features, "items"):
        return
    for name, feature in features.items():
        if hasattr(feature, "items"):
            yield from _leaves(feature, f"{prefix}{name}/")
        else:
            yield prefix + name, feature


def _at(example: Any, path: str) -> Any:
    for key in path.split("/"):
        example = example[key]
    return example


def _named(supervised: Any) -> list[str]:
    """The feature names in a supervised key, which may be nested."""
    if isinstance(supervised, str):
        return [supervised]
    if isinstance(supervised, dict):
        return [name for value in supervised.values() for name in _named(value)]
    if isinstance(supervised, (tuple, list)):
        return [name for value in supervised for name in _named(value)]
    return []


def _listed(known: dict[str, Any]) -> str:
    return ", ".join(sorted(known)) or "none"


def _text(value: Any) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
