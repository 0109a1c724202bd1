"""What a person decides: one closed, frozen section per step. Imports no TensorFlow.

    train = parse(TrainConfig, {"epochs": 3}, path="train")      # BadInput lists everything that is wrong, at once
    train == parse_json(TrainConfig, train.to_json(), path="train")

A section travels to its component as one JSON string, because a step's inputs are its cache key and because
Kubeflow Pipelines turns the integers of a dictionary into floats.
"""

import difflib
import itertools
import json
import math
import pkgutil
import re
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from trainer import metric_names
from trainer.errors import BadInput

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


def text(pattern: str, rule: str) -> Any:
    """A type for text of one form; whoever gives another form reads the rule, not the pattern."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise PydanticCustomError("form", "must be {rule}", {"rule": rule})
        return value

    return Annotated[str, AfterValidator(check), Field(json_schema_extra={"pattern": f"^(?:{pattern})$"})]


_MODEL_NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "models")])))
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_APPLICATION = re.compile(r"keras\.applications\.[A-Z]\w*")


OVERRIDDEN = -1  # in place of a line number: the value came from the command line


class Problem(NamedTuple):
    """One thing that is wrong: where, what stands there, and the rule it breaks."""

    path: str
    value: Any
    rule: str

    def __str__(self) -> str:
        return f"{self.path} = {_shown(self.value)}: {self.rule}"


class Section(BaseModel):
    """A closed, frozen group of settings; strict about types, so that `yes`, `"3"` and NaN are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    refused: ClassVar[dict[str, str]] = {}
    """Settings that a person may look for and that cannot be: name → what to do in their place."""

    def problems(self) -> Iterator[Problem]:
        """Combinations inside this section that cannot work; paths are relative to the section."""
        return iter(())

    def to_json(self) -> str:
        """The section as one compact JSON string with sorted keys: equal sections give equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


S = TypeVar("S", bound=Section)


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
    """The newest days of data that arrives day by day; `data.path` says `{date}` where the files' names have the day."""

    days: Annotated[int, Field(ge=1, le=3660)]
    """How many whole days, in UTC."""
    delay_hours: Annotated[int, Field(ge=0)] = 0
    """How long after its end a day's data may still arrive."""
    until: text(r"\d{4}-\d{2}-\d{2}", "a day such as 2027-01-31") | None = None
    """The last day, to repeat a run. None: from the moment at which the run begins."""

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
    path: str | None = None
    """The other sources: a folder, a file or a pattern of files, here or as `gs://…`. `tfds`: the folder of a prepared
    version, such as `/data/mnist/3.0.1`, in place of `name`."""
    window: DataWindow | None = None
    """The newest days only, where `path` has a `{date}`. None: everything."""
    data_dir: str | None = None
    """`tfds` only: folder with builders that were prepared before, and where new ones are put. None: TFDS's default."""
    download: bool = True
    """`tfds` only: whether preparation may fetch the dataset from its source when it is not in `data_dir`."""
    splits: Splits = Splits()
    """Which examples train, validate and test."""
    input_keys: list[str] | None = None
    """The features that the model is given. None: the builder's supervised input; of a table, every column but the
    label, the weight and `splits.by`."""
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
    min_shards: PositiveInt = 1
    """Fewest files a split is written to, so that as many workers can each take their own."""

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
        if self.label_key is not None and self.label_key in (self.input_keys or []):
            yield Problem("label_key", self.label_key, "is among input_keys, and the model would only copy it")

    def _window_problems(self) -> Iterator[Problem]:
        dated = self.path is not None and "{date}" in self.path
        if self.window is not None:
            for problem in self.window.problems():
                yield problem._replace(path=f"window.{problem.path}")
            if not dated or self.source == "tfds":
                yield Problem("window", self.window.model_dump(), "needs a source of files, and {date} in data.path")
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
                yield Problem(f"splits.{name}", value, f"must be a share, because {percents[0]} is one")
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
        ):
            for key in keys:
                if key is not None and key not in self.record_features and self.record_features:
                    yield Problem(setting, key, "is not in record_features")
        for name, feature in self.record_features.items():
            if feature.encoded and self.kinds.get(name) != "image":
                yield Problem(f"record_features.{name}.encoded", True, f"only an image is; set kinds.{name} to image")


CheckName = Literal["type", "presence", "range", "new_values", "drift", "skew", "few_examples", "leakage"]


class ValidateConfig(Section):
    """How the prepared data is looked at before anything is trained on it."""

    schema_file: str | None = None
    """JSON file with what is expected, which you keep beside your configuration; read when the pipeline is compiled. Each
    prepared dataset holds one to begin with, `schema.json`. None: that of the data the champion was trained on."""
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


class EarlyStopping(Section):
    """End the training when the validation no longer improves."""

    metric: Literal["loss", "accuracy", "mean_absolute_error"] = "loss"
    """The validation metric that is watched: `accuracy` of classes, `mean_absolute_error` of numbers."""
    patience_epochs: PositiveInt = 5
    """Epochs without an improvement after which the training ends."""
    min_delta: Annotated[float, Field(ge=0.0)] = 0.0
    """How much better a value has to be to count as an improvement."""


class LearningRateSchedule(Section):
    """How the learning rate changes from step to step."""

    name: Literal["constant", "cosine", "linear"] = "constant"
    """Shape after the warm-up: unchanged, half a cosine, or a straight line down to `final_fraction`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate grows from 0 in a straight line."""
    final_fraction: Fraction = 0.0
    """What is left of the learning rate at the last step, as a fraction (not for `constant`)."""


class WarmStart(Section):
    """First weights that another training made."""

    source: Annotated[str, Field(min_length=1)]
    """A `.keras` file, a folder that holds `model.keras` (a trained model, a registered version), or a checkpoint's folder
    (`step-00000230`); on this machine or under `gs://`."""
    except_layers: list[str] = []
    """Layers that keep their fresh weights, by name or pattern (`head*`): a new task's last layer, for example."""


# Arguments of a Keras optimizer that this trainer does itself, because Keras does them before the replicas' gradients are
# added, or not at all under some strategies.
_OWNED_OPTIMIZER_ARGS = {
    "learning_rate": "train.learning_rate",
    "clipvalue": "train.clip_value",
    "clipnorm": "train.clip_norm",
    "global_clipnorm": "train.clip_global_norm",
    "use_ema": "train.ema_decay",
    "ema_momentum": "train.ema_decay",
    "ema_overwrite_frequency": "train.ema_decay",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "loss_scale_factor": "train.precision",
}


class Augmentation(Section):
    """One random change of the training images: a Keras layer and its arguments."""

    layer: text(r"Random[A-Za-z]+", "the name of one of Keras's Random… layers")
    """Name of a Keras layer, such as `RandomFlip`, `RandomTranslation` or `RandomRotation`."""
    args: dict[str, Any] = {}
    """Its keyword arguments, such as `{mode: horizontal}`."""


class TrainConfig(Section):
    """The model, its optimizer, and how the training goes."""

    model: str = "cnn"
    """A model of this project by name, `keras.applications.<Architecture>`, or your own as `package.module:function`."""
    model_args: dict[str, Any] = {}
    """Keyword arguments of the model's `build` function."""
    warm_start: WarmStart | None = None
    """Weights of an earlier training to begin with. None: fresh weights from the seed."""
    frozen_layers: list[str] = []
    """Layers whose weights are not trained, by name or pattern (`block1_*`)."""
    sync_batch_norm: bool = False
    """Give every BatchNormalization layer the statistics of the global batch instead of each replica's own."""
    epochs: PositiveInt = 10
    """How many times the training split is gone through."""
    global_batch_size: PositiveInt = 64
    """Examples per step over all replicas together; a replica's share is derived."""
    loop: Literal["own", "keras_fit"] = "own"
    """`own`: this project's step, the same on any number of replicas. `keras_fit`: Keras' `fit`, for a model with its own
    `compile` or `train_step`; what Keras gets wrong on several replicas is then refused."""
    optimizer: str = "adam"
    """Any Keras optimizer by its name."""
    optimizer_args: dict[str, Any] = {}
    """Keyword arguments of the optimizer besides the learning rate."""
    learning_rate: PositiveFloat = 1e-3
    """The (highest) learning rate."""
    learning_rate_schedule: LearningRateSchedule = LearningRateSchedule()
    """How the learning rate changes from step to step."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by global_batch_size / base_batch_size (`linear`) or by its square root (`sqrt`)."""
    base_batch_size: PositiveInt | None = None
    """The batch that `learning_rate` was chosen for; needed by `learning_rate_scaling`."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Probability mass that is spread evenly over all classes."""
    class_weights: dict[str, Annotated[float, Field(ge=0.0)]] | Literal["balanced"] = {}
    """Weight of an example's loss by its class name; a class that is not named weighs 1. `balanced`: each class weighs
    the same in all, whatever its number of examples."""
    augmentation: list[Augmentation] = []
    """Random changes of the images, in this order, while training and never when the model answers."""
    clip_value: PositiveFloat | None = None
    """Clip every gradient element to ± this, after the replicas' gradients were added."""
    clip_norm: PositiveFloat | None = None
    """Clip each variable's gradient to this L2 norm, after the replicas' gradients were added."""
    clip_global_norm: PositiveFloat | None = None
    """Clip all gradients together to this L2 norm, after the replicas' gradients were added."""
    gradient_accumulation_steps: PositiveInt = 1
    """Parts that a global batch is gone through in, to save memory; the update is that of the whole batch."""
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay of an exponential moving average of the weights, which is then evaluated and exported. None: none is kept."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """What layers compute in; weights stay float32. `float16` scales the loss dynamically and skips steps that overflow."""
    jit_compile: bool = False
    """Compile the forward and backward pass with XLA."""
    eager: bool = False
    """Run without compiled graphs, for a debugger: the same numbers, many times slower."""
    deterministic: bool = False
    """Choose operations that give the same bits each time, where a device has quicker ones that do not."""
    nan_policy: Literal["stop", "skip_step"] = "stop"
    """When the loss or a gradient is not finite: stop the training, or leave the step out."""
    max_skipped_steps: PositiveInt = 10
    """With `skip_step`: how many steps in a row may be left out before the training stops."""
    early_stopping: EarlyStopping | None = None
    """End the training when the validation no longer improves. None: all epochs are trained."""
    keep_best: Literal["loss", "accuracy", "mean_absolute_error"] | None = "loss"
    """Export the weights of the epoch with the best validation value of this metric. None: those of the last epoch."""
    strategy: Literal[
        "auto",
        "default",
        "one_device",
        "mirrored",
        "multi_worker_mirrored",
        "central_storage",
        "parameter_server",
        "tpu",
    ] = "default"
    """The `tf.distribute` strategy. `auto`: several workers → multi_worker_mirrored, several accelerators → mirrored, else
    one_device."""
    num_virtual_devices: Annotated[int, Field(ge=1, le=16)] | None = None
    """Split the CPU into this many logical devices, to rehearse a strategy on a machine without accelerators."""
    cross_device: Literal["auto", "one_device", "hierarchical_copy", "nccl"] = "auto"
    """How `mirrored` adds gradients over devices. `auto`: NCCL between GPUs, on one device between CPUs."""
    communication: Literal["auto", "ring", "nccl"] = "auto"
    """How `multi_worker_mirrored` adds gradients over workers."""
    steps_per_loop: PositiveInt | None = None
    """Most steps that one call of the compiled loop runs. None: about half a second's worth."""
    checkpoint_every_steps: PositiveInt | None = None
    """Save a checkpoint every so many steps, besides the end of each epoch."""
    checkpoint_every_secs: PositiveFloat | None = None
    """Save a checkpoint when so many seconds have passed since the last one, besides the end of each epoch."""
    keep_checkpoints: PositiveInt = 3
    """How many of the newest checkpoints are kept."""
    bucket_texts: bool = False
    """Put texts of about the same length into a batch, which then needs little padding. Needs a split that is held in
    memory; which texts share a batch still changes from epoch to epoch."""
    tensorboard_dir: str | None = None
    """Folder or `gs://` prefix for TensorBoard's logs: scalars, the graph and the profile. None: none are written."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step that TensorFlow's profiler watches; the profile goes to `tensorboard_dir`."""
    cache_bytes: Annotated[int, Field(ge=0)] = 2 * 1024**3
    """A prepared split up to this size is held in memory; a larger one is streamed."""
    shuffle_buffer_bytes: PositiveInt = 256 * 1024**2
    """Memory of the shuffle buffer when a split is streamed."""

    def problems(self) -> Iterator[Problem]:
        """Settings that exclude one another."""
        if (
            self.model not in _MODEL_NAMES
            and not _IMPORT_PATH.fullmatch(self.model)
            and not _APPLICATION.fullmatch(self.model)
        ):
            yield Problem(
                "model",
                self.model,
                f"must be one of {', '.join(_MODEL_NAMES)}, keras.applications.<Architecture>, or your own as"
                " package.module:function" + suggestion(self.model, _MODEL_NAMES),
            )
        if self.bucket_texts and self.strategy == "parameter_server":
            yield Problem("bucket_texts", True, "is not for parameter_server, whose workers take batches as they come")
        clips = [key for key in ("clip_value", "clip_norm", "clip_global_norm") if getattr(self, key) is not None]
        for key in clips[1:]:
            yield Problem(key, getattr(self, key), f"only one kind of clipping can act, and {clips[0]} is set too")
        if self.gradient_accumulation_steps > self.global_batch_size:
            yield Problem(
                "gradient_accumulation_steps",
                self.gradient_accumulation_steps,
                f"must not exceed global_batch_size ({self.global_batch_size})",
            )
        for key, setting in _OWNED_OPTIMIZER_ARGS.items():
            if key in self.optimizer_args:
                yield Problem(f"optimizer_args.{key}", self.optimizer_args[key], f"belongs to {setting}")
        if (self.learning_rate_scaling == "none") != (self.base_batch_size is None):
            yield Problem(
                "base_batch_size", self.base_batch_size, "is for learning_rate_scaling, and each needs the other"
            )
        if self.profile_steps is not None:
            first, last = self.profile_steps
            if first > last:
                yield Problem("profile_steps", list(self.profile_steps), "must be the first and the last step")
            if self.tensorboard_dir is None:
                yield Problem("profile_steps", list(self.profile_steps), "needs tensorboard_dir to write to")
        yield from self._strategy_problems()
        if self.loop == "keras_fit":
            yield from self._keras_fit_problems()

    def _strategy_problems(self) -> Iterator[Problem]:
        strategy = self.strategy
        if self.num_virtual_devices:
            if strategy not in ("mirrored", "central_storage"):
                yield Problem(
                    "num_virtual_devices", self.num_virtual_devices, "acts under mirrored and central_storage only"
                )
            elif self.global_batch_size < self.num_virtual_devices:
                yield Problem(
                    "global_batch_size",
                    self.global_batch_size,
                    f"must give every replica an example: at least num_virtual_devices ({self.num_virtual_devices})",
                )
        if self.cross_device != "auto" and strategy not in ("mirrored", "auto"):
            yield Problem("cross_device", self.cross_device, "acts under mirrored only")
        if self.communication != "auto" and strategy not in ("multi_worker_mirrored", "auto"):
            yield Problem("communication", self.communication, "acts under multi_worker_mirrored only")
        if strategy == "central_storage" and self.precision == "float16":
            yield Problem(
                "precision",
                self.precision,
                "central_storage cannot hold the loss scale that float16 needs; use bfloat16, or mirrored",
            )
        if strategy == "parameter_server":
            refused = {
                "eager": (self.eager, "a coordinator can schedule compiled steps only"),
                "ema_decay": (self.ema_decay, "asynchronous workers have no common step at which to average"),
                "gradient_accumulation_steps": (
                    self.gradient_accumulation_steps if self.gradient_accumulation_steps > 1 else None,
                    "each worker's step is an update of its own; use a smaller global_batch_size",
                ),
                "nan_policy": (
                    self.nan_policy if self.nan_policy != "stop" else None,
                    "no step is common to all workers",
                ),
                "precision": (
                    self.precision if self.precision == "float16" else None,
                    "asynchronous workers cannot agree on a loss scale; use bfloat16",
                ),
                "jit_compile": (self.jit_compile, "variables on parameter servers are out of XLA's reach"),
                "sync_batch_norm": (self.sync_batch_norm, "asynchronous workers have no global batch"),
                "profile_steps": (self.profile_steps, "the coordinator runs no steps itself"),
            }
            for key, (value, reason) in refused.items():
                if value:
                    yield Problem(key, value, f"not under parameter_server: {reason}")
        if self.sync_batch_norm and self.gradient_accumulation_steps > 1:
            yield Problem(
                "sync_batch_norm",
                True,
                "the statistics of a part are not those of the global batch that"
                " gradient_accumulation_steps promises; choose one",
            )
        if self.sync_batch_norm and self.jit_compile:
            yield Problem(
                "sync_batch_norm", True, "adds over replicas within the pass that jit_compile gives to XLA; choose one"
            )
        if self.sync_batch_norm and self.strategy == "central_storage":
            yield Problem(
                "sync_batch_norm", True, "central_storage cannot hold BatchNormalization's statistics; use mirrored"
            )
        if self.eager and self.jit_compile:
            yield Problem("jit_compile", True, "compiles what eager leaves uncompiled; choose one")

    def _keras_fit_problems(self) -> Iterator[Problem]:
        if self.strategy not in ("auto", "default", "one_device", "mirrored"):
            reason = {
                "multi_worker_mirrored": "Keras cannot read its metrics on several workers",
                "central_storage": "Keras doubles its metrics there",
            }.get(self.strategy, "Keras' fit does not work there")
            yield Problem("loop", self.loop, f"not under {self.strategy}: {reason}; use own")
        defaults = type(self)(strategy="default")
        owned = (
            "gradient_accumulation_steps", "ema_decay", "nan_policy", "class_weights", "label_smoothing",
            "clip_value", "clip_norm", "clip_global_norm", "checkpoint_every_steps", "checkpoint_every_secs",
            "profile_steps", "steps_per_loop",
        )  # fmt: skip
        for key in owned:
            value = getattr(self, key)
            if value != getattr(defaults, key):
                yield Problem(key, value, "is done by this project's own step; with keras_fit it would not act")


class GroupConfig(Section):
    """How many processes train together, and how patient they are with one another."""

    num_workers: Annotated[int, Field(ge=1, le=1000)] = 1
    """Processes that train. With parameter servers a coordinating process is added."""
    num_parameter_servers: Annotated[int, Field(ge=0, le=100)] = 0
    """Processes that hold variables for asynchronous workers."""
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 3
    """How often a group that failed is started again, from its last checkpoint."""
    start_timeout_secs: PositiveFloat = 600.0
    """How long the processes wait for one another at the start; then the one that is missing is named."""
    grace_period_secs: PositiveFloat = 30.0
    """How long a checkpoint may take after SIGTERM."""

    @property
    def is_several(self) -> bool:
        """Whether more than one process is needed."""
        return self.num_workers > 1 or self.num_parameter_servers > 0


class Threshold(Section):
    """What a metric must reach. Whether higher or lower is better is known for each metric."""

    value_threshold: float | None = None
    """The value itself must be at least (for a loss: at most) this."""
    change_threshold: float | None = None
    """The value must be better than the champion's on the same examples by at least this; negative allows it to be that
    much worse. Without a champion this rule does not apply."""
    relative: bool = False
    """Whether `change_threshold` is a fraction of the champion's value rather than a difference in the metric's units."""
    confidence: Literal["estimate", "bound"] = "estimate"
    """What decides: the value that was found, or the unfavourable end of its interval (`evaluate.confidence_level`), so
    that chance alone does not bless."""

    def problems(self) -> Iterator[Problem]:
        """A threshold that asks for nothing, or says how to read what is not there."""
        if self.value_threshold is None and self.change_threshold is None:
            yield Problem("value_threshold", None, "a threshold needs value_threshold, change_threshold or both")
        elif self.relative and self.change_threshold is None:
            yield Problem("relative", True, "says how change_threshold is meant, and there is none")


class Slicing(Section):
    """A way to take the test split apart, and what each of its slices must reach."""

    by: Annotated[list[str], Field(max_length=4)] = []
    """Features whose values make the slices; several make crosses. The label's name slices by class."""
    bins: dict[str, Annotated[list[float], Field(min_length=1)]] = {}
    """Edges, growing, that cut a number of `by` into ranges: `{age: [18, 65]}` makes three."""
    function: str | None = None
    """Your own instead, as `package.module:function`: it takes features by name [n, …] and labels [n], and gives a name
    for the slice of each example, or None for those that are in none."""
    thresholds: dict[str, Threshold] = {}
    """What each slice must reach, by metric, besides the thresholds for the whole split."""

    def problems(self) -> Iterator[Problem]:
        """A slicing by nothing, by two things at once, or with edges that do not grow."""
        if bool(self.by) == bool(self.function):
            yield Problem("by", self.by, "a slicing needs either by or function")
        for name, edges in self.bins.items():
            if name not in self.by:
                yield Problem(f"bins.{name}", edges, "is not among by")
            elif any(low >= high for low, high in itertools.pairwise(edges)):
                yield Problem(f"bins.{name}", edges, "edges must grow")
        if self.function is not None and not _IMPORT_PATH.fullmatch(self.function):
            yield Problem("function", self.function, "must be package.module:function")


class OwnMetric(Section):
    """A metric of your own."""

    function: str
    """As `package.module:function`: it takes labels [n] (class indices or numbers) and answers (probabilities
    [n, classes] or numbers [n]), and gives one number."""
    lower_is_better: bool = False
    """Which way is better."""

    def problems(self) -> Iterator[Problem]:
        """A function that cannot be named."""
        if not _IMPORT_PATH.fullmatch(self.function):
            yield Problem("function", self.function, "must be package.module:function")


class EvaluateConfig(Section):
    """How the model is measured on the test split and what it has to reach."""

    batch_size: PositiveInt = 256
    """Examples per call of the exported model; no metric depends on it."""
    thresholds: dict[str, Threshold] | None = None
    """What each named metric must reach for the model to be blessed. None: accuracy (of numbers: mean_absolute_error)
    must be no worse than the champion's."""
    slices: list[Slicing] = []
    """Ways to take the test split apart."""
    min_slice_examples: Annotated[int, Field(ge=2)] = 30
    """Slices with fewer examples are shown and not judged."""
    confidence_level: Annotated[float, Field(ge=0.5, le=0.999)] = 0.95
    """How often an interval holds the true value."""
    accept_new_baseline: bool = False
    """Whether a champion that cannot be measured on this data (other features or classes) may be replaced all the same;
    then only value thresholds decide."""
    top_k: PositiveInt = 5
    """`top_k_accuracy` counts an example whose class is among so many most probable ones."""
    quantiles: list[Annotated[float, Field(gt=0.0, lt=1.0)]] = []
    """Quantiles of which the pinball loss is measured, as `pinball_0.9`; for labels that are numbers."""
    own_metrics: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], OwnMetric] = {}
    """Metrics of your own by name."""
    num_mistakes: Annotated[int, Field(ge=0, le=100)] = 24
    """How many of the worst mistakes the report shows."""

    def lower_is_better(self, metric: str) -> bool:
        """Whether the smaller value of a metric, perhaps one's own, is the better one."""
        own = self.own_metrics.get(metric)
        return own.lower_is_better if own else metric_names.lower_is_better(metric)

    def problems(self) -> Iterator[Problem]:
        """Thresholds that no model can reach or miss, and metrics that do not exist."""
        for name, metric in self.own_metrics.items():
            if name in metric_names.ALL or name.startswith("pinball"):
                yield Problem(f"own_metrics.{name}", metric.function, "is the name of a metric that is there already")
            for problem in metric.problems():
                yield problem._replace(path=f"own_metrics.{name}.{problem.path}")
        for index, slicing in enumerate(self.slices):
            for problem in slicing.problems():
                yield problem._replace(path=f"slices.{index}.{problem.path}")
        for path, thresholds in self.thresholds_by_path():
            yield from self._threshold_problems(path, thresholds)

    def thresholds_by_path(self) -> Iterator[tuple[str, dict[str, Threshold]]]:
        """Those of the whole split and of each slicing, with their place in this section."""
        yield "thresholds", self.thresholds or {}
        for index, slicing in enumerate(self.slices):
            yield f"slices.{index}.thresholds", slicing.thresholds

    def _threshold_problems(self, path: str, thresholds: dict[str, Threshold]) -> Iterator[Problem]:
        known = [*metric_names.ALL, *map(metric_names.pinball_name, self.quantiles), *self.own_metrics]
        for metric, threshold in thresholds.items():
            if metric not in known:
                rule = f"must be one of {', '.join(known)}" + suggestion(metric, known)
                yield Problem(f"{path}.{metric}", threshold.model_dump(exclude_defaults=True), rule)
            for problem in threshold.problems():
                yield problem._replace(path=f"{path}.{metric}.{problem.path}")
            value = threshold.value_threshold
            if metric_names.is_fraction(metric) and value is not None and not 0.0 <= value <= 1.0:
                yield Problem(f"{path}.{metric}.value_threshold", value, f"{metric} lies between 0 and 1")


class ServingConfig(Section):
    """What the export must do in a fresh process with nothing but TensorFlow, before it may be promoted."""

    tolerance: PositiveFloat = 1e-5
    """Largest difference from the trainer's own answers: of probabilities as they are, of numbers over 1 relative."""
    num_requests: Annotated[int, Field(ge=20)] = 200
    """Requests of one example that are timed."""
    max_load_secs: PositiveFloat = 60.0
    """Longest time to load the model, the import of TensorFlow not counted."""
    max_p50_ms: PositiveFloat | None = None
    """Longest time that half of the requests of one example may take. None: no limit."""
    max_p99_ms: PositiveFloat | None = 1000.0
    """Longest time that 99 of 100 requests of one example may take. None: no limit."""
    max_memory_bytes: PositiveInt = 4 * 1024**3
    """Most memory that the process may take, TensorFlow's own half gigabyte included."""
    timeout_secs: PositiveFloat = 600.0
    """After this the check is ended and has failed."""


class PushConfig(Section):
    """Where a blessed model goes."""

    registry: str | None = None
    """Folder or `gs://` prefix of the model registry. None: `models` under the root of the run."""
    keep_versions: PositiveInt = 10
    """How many of the newest versions the registry keeps, besides every version that was ever champion."""


class RetrainConfig(Section):
    """Whether there is anything to train for."""

    when: Literal["always", "data_changed"] = "always"
    """`data_changed`: training is skipped where the prepared data is what the champion was trained on."""
    force: bool = False
    """Train all the same, this time."""

    def problems(self) -> Iterator[Problem]:
        """Force where nothing is ever skipped."""
        if self.force and self.when == "always":
            yield Problem("force", True, "changes nothing, since retrain.when is always")


class Channel(Section):
    """One way to reach somebody. Addresses stand in a Kubernetes secret, never here."""

    kind: Literal["webhook", "slack", "email"]
    """`webhook`: JSON with every fact. `slack`: text for an incoming webhook of Slack or of what understands the same.
    `email`: by SMTP."""
    secret: text(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", "the name of a Kubernetes secret")
    """Secret with the key `url`: of the webhook, or `smtp://user:password@host:587`; for e-mail also `to` and `from`."""


Event = Literal["failed", "not_blessed", "promoted", "skipped"]


class NotifyConfig(Section):
    """Who hears how a run ended. It never fails a run."""

    on: list[Event] = ["failed", "not_blessed", "promoted"]
    """What is told: the run failed, the model was not good enough, it was promoted, training was skipped."""
    channels: list[Channel] = Field(min_length=1)
    """Who is told."""
    run_link: str | None = None
    """Address of Kubeflow's pages, for a link to the run. None: `kubeflow.host`."""


def parse(model: type[S], data: Any, *, path: str = "", lines: dict[str, int] | None = None, source: str = "") -> S:
    """Validates data against a section, reporting everything that is wrong at once.

    Args:
        model: The section's class.
        data: What was read from YAML or JSON: mappings, lists and scalars.
        path: Dotted path of the section, put before each problem's own.
        lines: Line number (from 1) by full dotted path, where known, or `OVERRIDDEN`; shown before the problem.
        source: File name shown before the line number.

    Raises:
        BadInput: With one line per problem: dotted path, value, rule.
    """
    problems, section = _validated(model, data)
    if section is not None and not problems:
        return section

    def shown(problem: Problem) -> str:
        full = ".".join(part for part in (path, problem.path) if part)
        where = _line(full, lines or {})
        prefix = (
            "--set: " if where == OVERRIDDEN else f"{source}:{where}: " if where else f"{source}: " if source else ""
        )
        return prefix + str(problem._replace(path=full or "(the whole file)"))

    raise BadInput("\n".join(dict.fromkeys(shown(problem) for problem in problems)))


def parse_json(model: type[S], text: str, *, path: str = "") -> S:
    """A section from its JSON string, as `Section.to_json` gives it. Raises BadInput."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"{path or 'configuration'} = {_shown(text)}: is not JSON ({error})") from None
    return parse(model, data, path=path)


def _validated(model: type[S], data: Any) -> tuple[list[Problem], S | None]:
    """All problems of the data. Values that are wrong by themselves are left out and the rest is looked at again,
    so that impossible combinations are reported in the same breath."""
    if not isinstance(data, dict):
        return [Problem("", data, "must be a mapping of settings")], None
    wrong: list[Problem] = []
    remaining = data
    for _ in range(3):
        try:
            section = model.model_validate_json(json.dumps(remaining))
        except ValidationError as error:
            found = error.errors(include_url=False)
            wrong += [_problem(model, entry) for entry in found]
            remaining = _without(remaining, [_location(remaining, entry["loc"]) for entry in found])
            for name, info in model.model_fields.items():
                if info.is_required() and name not in remaining and info.examples:
                    remaining[name] = info.examples[0]
            continue
        skipped = {problem.path for problem in wrong}
        crossings = [problem for problem in section.problems() if not (skipped & _mentioned(problem))]
        return wrong + crossings, section
    return wrong, None


def _mentioned(problem: Problem) -> set[str]:
    parts = problem.path.split(".")
    return {".".join(parts[: n + 1]) for n in range(len(parts))}


def _location(data: Any, loc: Sequence[int | str]) -> tuple[int | str, ...]:
    """The part of a pydantic location that names a place in the data (it also names union members)."""
    place: list[int | str] = []
    for part in loc:
        if (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            data = data[part]
        else:
            continue
        place.append(part)
    return tuple(place)


def _without(data: Any, places: list[tuple[int | str, ...]]) -> Any:
    copy = json.loads(json.dumps(data))
    for place in places:
        node, last = copy, None
        for part in place[:-1]:
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list):
                last = True  # leave a list as a whole: removing one element would change the others' meaning
                break
        if last is None and place and isinstance(node, dict):
            node.pop(place[-1], None)
    return copy


def _problem(model: type[Section], entry: dict[str, Any]) -> Problem:
    loc = [part for part in entry["loc"] if not (isinstance(part, str) and ("[" in part or part == "function-after"))]
    path = ".".join(str(part) for part in loc)
    kind, context = entry["type"], entry.get("ctx", {})
    value = entry["input"]
    if kind == "extra_forbidden":
        section, key = _section_at(model, loc[:-1]), str(loc[-1])
        known = list(section.model_fields) if section else []
        return Problem(path, value, getattr(section, "refused", {}).get(key) or "unknown key" + suggestion(key, known))
    if kind == "missing":
        return Problem(path, None, "must be given")
    rules = {
        "greater_than": "must be greater than {gt}",
        "greater_than_equal": "must be at least {ge}",
        "less_than": "must be less than {lt}",
        "less_than_equal": "must be at most {le}",
        "literal_error": "must be one of {expected}",
        "finite_number": "must be a finite number",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "string_pattern_mismatch": "must match {pattern}",
        "dict_type": "must be a mapping",
        "model_type": "must be a mapping of settings",
        "list_type": "must be a list",
        "tuple_type": "must be a list",
    }
    if kind in rules:
        return Problem(path, value, rules[kind].format(**context))
    return Problem(path, value, entry["msg"][0].lower() + entry["msg"][1:])


def _section_at(model: Any, loc: Sequence[int | str]) -> type[Section] | None:
    """The section at a location, through mappings and lists of sections."""
    kind = model
    for part in loc:
        section = _section_in(kind)
        if section is not None and part in section.model_fields:
            kind = section.model_fields[part].annotation
    return _section_in(kind)


def _section_in(kind: Any) -> type[Section] | None:
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    return next((found for inner in get_args(kind) if (found := _section_in(inner))), None)


def suggestion(word: str, known: Sequence[str]) -> str:
    """`; did you mean …?` where a known word is near, else nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def _line(path: str, lines: dict[str, int]) -> int | None:
    while path:
        if path in lines:
            return lines[path]
        path = path.rpartition(".")[0]
    return None


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


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
