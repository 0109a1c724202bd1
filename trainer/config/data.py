"""Where the examples come from, how they are prepared, and how they are looked at before anything is trained on them."""

import re
from collections.abc import Iterator
from datetime import date
from typing import Annotated, Literal

from pydantic import Field

from trainer.config.section import Fraction, Place, PositiveInt, Problem, Section, text

SHARDS_FOR_MOST = 16  # of a split that is large enough, so that groups of most sizes find the same data prepared


class Splits(Section):
    """Which examples train, validate and test.

    For `tfds` each is a split expression of TensorFlow Datasets. For the other sources all are shares of the whole that
    add up to 100 (`80%`), or all are patterns of files under `data.path` (`train/*.csv`; for `image_folder` the folder
    that holds the classes).
    """

    train: str = "train[:90%]"
    """Examples that the weights are fitted to."""
    validation: str | None = "train[90%:]"
    """Examples that are looked at after each epoch, to choose the best weights. None: there are none."""
    test: str = "test"
    """Examples that nothing but the evaluation sees."""
    by: str | None = None
    """A column whose equal values never fall into two splits, such as a person's number; goes with shares.
    None: shares are cut by position."""

    def named(self) -> dict[str, str]:
        """What was given for each split that there is."""
        given = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: value for name, value in given.items() if value is not None}

    def shares(self) -> dict[str, int]:
        """Percent by split, where shares were given; otherwise empty."""
        found = {name: _SHARE.fullmatch(value) for name, value in self.named().items()}
        return {name: int(match[1]) for name, match in found.items() if match} if all(found.values()) else {}


_SHARE = re.compile(r"(\d{1,3})%")
SourceName = Literal["tfds", "image_folder", "csv", "tsv", "jsonl", "parquet", "tfrecord"]
KindName = Literal["image", "number", "category", "text"]


class RecordFeature(Section):
    """How one feature stands in the `tf.Example` records of a `tfrecord` source."""

    type: Literal["int64", "float32", "bytes"]
    """The list of the example that holds it."""
    shape: tuple[PositiveInt, ...] = ()
    """Shape of its value; empty for a single one. Of an image, height, width and channels."""
    encoded: bool = False
    """An image only: the bytes are a JPEG, PNG or another image file, not the pixels themselves."""


class DataWindow(Section):
    """The newest days of data that arrives day by day, by a `{date}` in `data.path`, by a column, or by both."""

    days: Annotated[int, Field(ge=1, le=3660)]
    """How many whole days, in UTC."""
    delay_hours: Annotated[int, Field(ge=0)] = 0
    """How long after its end a day's data may still arrive."""
    until: text(r"\d{4}-\d{2}-\d{2}", "a day such as 2027-01-31") | None = None
    """The last day, to repeat a run. None: from the moment for which the run was scheduled, or at which it begins."""
    column: Annotated[str, Field(min_length=1)] | None = None
    """The column that holds each row's day: a date, a date and time (in UTC where it says no zone), or seconds since 1970.
    It is no input unless `input_keys` names it. None: files are told apart, by `{date}` in their names."""

    def problems(self) -> Iterator[Problem]:
        """A day that no calendar has."""
        if self.until is not None:
            try:
                date.fromisoformat(self.until)
            except ValueError as error:
                yield Problem("until", self.until, f"is no day: {error}")


class DataConfig(Section):
    """Where the examples come from and how they are prepared."""

    source: SourceName = "tfds"
    """`tfds`: a TensorFlow Datasets builder. `image_folder`: a folder a class. `csv`, `tsv`, `jsonl`, `parquet`: tables.
    `tfrecord`: files of `tf.Example`."""
    name: text(
        r"[\w.-]+(/[\w.-]+)?(:(\d+\.\d+\.\d+|\*))?|[A-Za-z_][\w.]*:[A-Za-z_]\w*",
        "builder, builder/config or builder:1.0.0, or package.module:Class",
    ) = "digits"
    """`tfds` only: builder, configuration and version (`digits`, `mnist`, `imagenet_resized/8x8`, `cifar10:3.0.2`), or
    your own builder as `package.module:Class`."""
    path: Place | None = None
    """The other sources: a folder, a file or a pattern of files, here or as `gs://…`. `tfds`: the folder of a prepared
    version, such as `/data/mnist/3.0.1`, in place of `name`."""
    window: DataWindow | None = None
    """The newest days only, by a `{date}` in `path` or by a column. None: everything."""
    data_dir: Place | None = None
    """`tfds` only: folder or `gs://` prefix with builders that were prepared before, and where new ones are put. None: TFDS's
    default folder."""
    download: bool = True
    """`tfds` only: whether preparation may fetch the dataset from its source when it is not in `data_dir`."""
    splits: Splits = Splits()
    """Which examples train, validate and test."""
    input_keys: list[str] | None = None
    """The features that the model is given. None: the builder's supervised input; of a table, every column but the
    label, the weight, `splits.by` and `window.column`."""
    label_key: str | None = None
    """The feature that is to be told. None: the builder's supervised target; an image folder's classes."""
    weight_key: str | None = None
    """A number in each record that multiplies its loss in training. None: every example weighs the same."""
    kinds: dict[str, KindName] = {}
    """What a feature is taken for, where its type leaves a choice: `{zip_code: category, title: text}`. A text column
    taken for an `image` holds the image file's path, from the table's own folder."""
    record_features: dict[str, RecordFeature] = {}
    """`tfrecord` only: the features of the records, label and weight among them."""
    task: Literal["classification", "regression"] | None = None
    """What is to be told: one of several classes, or a number. None: the label's type decides."""
    missing_values: list[str] = ["", "NA", "N/A", "NaN", "nan", "NULL", "null"]
    """`csv` and `tsv` only: what stands for a value that is not there."""
    image_size: tuple[PositiveInt, PositiveInt] | None = None
    """Height and width in pixels that every image is resized to. None: their own size, which must be the same for all."""
    image_channels: Literal[1, 3] | None = None
    """Grey or colour, for images that are read from files. None: colour; `tfds` keeps the builder's own."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    """What becomes of a record that cannot be used: it ends the preparation, or it is left out and counted."""
    max_bad_records: PositiveInt = 100
    """With `skip`: more bad records than this end the preparation after all."""
    shard_bytes: PositiveInt = 64 * 1024**2
    """About how large one file of the prepared dataset becomes."""
    min_shards: PositiveInt | None = None
    """Fewest files a split is written to. None: 16, as far as each then holds 4 MB, and with more workers than that as many
    as there are workers."""

    @property
    def subject(self) -> str:
        """What the examples are called in a sentence."""
        return self.path or self.name

    def problems(self) -> Iterator[Problem]:
        """Settings that do not belong to the source, and splits that cannot be read."""
        given = self.splits.named()
        yield from self._window_problems()
        if self.source == "tfds":
            for key, value in given.items():
                if rule := _split_fault(value):
                    yield Problem(f"splits.{key}", value, rule)
            if self.splits.by is not None:
                yield Problem("splits.by", self.splits.by, "goes with shares of files, and source is tfds")
        else:
            yield from self._file_problems(given)
        if self.source != "tfrecord" and self.record_features:
            yield Problem("record_features", sorted(self.record_features), "belongs to source tfrecord")
        if self.image_channels is not None and self.source == "tfds":
            yield Problem("image_channels", self.image_channels, "a builder's images keep their own channels")
        if self.source != "tfds":
            for key, unset in (("name", "digits"), ("data_dir", None)):
                if getattr(self, key) != unset:
                    yield Problem(key, getattr(self, key), "belongs to source tfds; files are found by path")
        if self.weight_key is not None and self.weight_key == self.label_key:
            yield Problem("weight_key", self.weight_key, "is the label")
        if self.splits.by is not None and self.splits.by == self.label_key:
            yield Problem("splits.by", self.splits.by, "is the label, and no class would be in two splits")
        if self.label_key is not None and self.label_key in (self.input_keys or []):
            yield Problem("label_key", self.label_key, "is among input_keys, and the model would only copy it")

    def _window_problems(self) -> Iterator[Problem]:
        dated = self.path is not None and "{date}" in self.path
        if self.window is not None:
            for problem in self.window.problems():
                yield problem._replace(path=f"window.{problem.path}")
            column = self.window.column
            if self.source == "tfds":
                yield Problem("window", self.window.model_dump(), "needs a source of files")
            elif not dated and column is None:
                yield Problem("window", self.window.model_dump(), "needs {date} in data.path, or a column")
            elif column is not None and self.source == "image_folder":
                yield Problem("window.column", column, "an image folder has no columns")
            elif column is not None and column in (self.label_key, self.weight_key):
                yield Problem("window.column", column, "is the label or the weight")
        elif dated:
            yield Problem("path", self.path, "has a {date}, and data.window does not say which days")

    def _file_problems(self, given: dict[str, str]) -> Iterator[Problem]:
        if self.path is None:
            yield Problem("path", None, f"source {self.source} needs a folder, a file or a pattern of files")
        shares, percents = self.splits.shares(), [name for name, value in given.items() if _SHARE.fullmatch(value)]
        for name, value in given.items():
            if "[" in value and self.splits == Splits(by=self.splits.by):
                yield Problem(f"splits.{name}", value, "must be a share such as 80%, or a pattern of files under path")
            elif percents and not shares and name not in percents:
                rule = f"must be a share of whole percents such as 10%, because {percents[0]} is one"
                yield Problem(f"splits.{name}", value, rule)
        if shares and sum(shares.values()) != 100:
            yield Problem("splits", shares, "shares must add up to 100 %")
        for name in (name for name, share in shares.items() if share == 0):
            yield Problem(f"splits.{name}", "0%", "holds no examples")
        if self.splits.by is not None and not shares:
            yield Problem("splits.by", self.splits.by, "goes with shares, and the splits are patterns of files")
        if self.source == "image_folder":
            for key in ("label_key", "weight_key", "input_keys"):
                if getattr(self, key) is not None:
                    yield Problem(
                        key, getattr(self, key), "an image folder holds images and classes, nothing to choose"
                    )
            if self.splits.by is not None:
                yield Problem("splits.by", self.splits.by, "an image folder has no columns")
            if self.task == "regression":
                yield Problem("task", self.task, "an image folder's labels are classes; put numbers into a table")
        elif self.label_key is None:
            yield Problem("label_key", None, f"source {self.source} needs the name of what is to be told")
        if self.source == "tfrecord" and not self.record_features:
            yield Problem("record_features", {}, "source tfrecord needs the features of its records")
        if self.source == "tfrecord":
            yield from self._record_problems()

    def _record_problems(self) -> Iterator[Problem]:
        for setting, keys in (
            ("label_key", [self.label_key]),
            ("weight_key", [self.weight_key]),
            ("splits.by", [self.splits.by]),
            ("input_keys", self.input_keys or []),
            ("kinds", list(self.kinds)),
            ("window.column", [self.window.column if self.window else None]),
        ):
            for key in keys:
                if key is not None and key not in self.record_features and self.record_features:
                    yield Problem(setting, key, "is not in record_features")
        dated = self.record_features.get(self.window.column or "") if self.window else None
        if dated is not None and (dated.shape or dated.type == "float32"):
            yield Problem("window.column", self.window.column, "must be one value of int64 or bytes")
        for name, feature in self.record_features.items():
            if feature.encoded and self.kinds.get(name) != "image":
                yield Problem(f"record_features.{name}.encoded", True, f"only an image is; set kinds.{name} to image")


CheckName = Literal["type", "presence", "range", "new_values", "drift", "skew", "few_examples", "leakage"]


class ValidateConfig(Section):
    """How the prepared data is looked at before anything is trained on it."""

    schema_file: str | None = None
    """JSON file with what is expected, which you keep in git with your configuration; read when the pipeline is compiled. A
    relative path counts from where the command is started. Each prepared dataset holds one to begin with, `schema.json`.
    None: that of the data the champion was trained on."""
    severities: dict[CheckName, Literal["error", "warning", "off"]] = {}
    """How grave a finding is; `error` ends the run. By default `type` and `presence` are errors, and the others are
    warnings: `range`, `new_values`, `drift` (from the champion's data), `skew` (between splits), `few_examples` and
    `leakage`."""
    category_distance: Literal["l_infinity", "jensen_shannon"] = "l_infinity"
    """How distributions of categories and classes are compared."""
    number_distance: Literal["kolmogorov_smirnov", "jensen_shannon"] = "kolmogorov_smirnov"
    """How distributions of numbers, text lengths and pixels are compared."""
    drift_threshold: Fraction = 0.1
    """Largest distance of the train split from the data that the champion was trained on."""
    skew_threshold: Fraction = 0.1
    """Largest distance of the other splits from the train split."""
    min_examples_per_class: PositiveInt = 10
    """Fewest examples that each class has in each split."""


_SPLIT_PART = re.compile(r"(?P<split>[\w-]+)(\[(?P<from>-?\d+%?)?:(?P<to>-?\d+%?)?\])?")


def _split_fault(expression: str) -> str | None:
    """The rule that a split expression breaks, or None. Counts are checked once the dataset is known."""
    for part in expression.split("+"):
        match = _SPLIT_PART.fullmatch(part.strip())
        if not match:
            return "must be a split expression such as train, train[:90%] or train[:1000]+test"
        bounds = []
        for edge in ("from", "to"):
            text = match[edge]
            if text and text.endswith("%"):
                percent = int(text[:-1])
                if abs(percent) > 100:
                    return f"{text} is over 100 %"
                bounds.append(percent + 100 if percent < 0 else percent)
            else:
                bounds.append((0 if edge == "from" else 100) if text is None else None)
        low, high = bounds
        if low is not None and high is not None and low >= high:
            return f"{part.strip()} holds no examples: it ends at or before its start"
    return None
