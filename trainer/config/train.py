"""What is trained, how, and by how many processes."""

import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.section import (
    IMPORT_PATH,
    Fraction,
    Place,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    suggestion,
    text,
)

_MODEL_NAMES = tuple(
    sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parents[1] / "models")]))
)
_APPLICATION = re.compile(r"keras\.applications\.[A-Z]\w*")


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
    one_device. Not given: `default`, and `auto` where the cluster section asks for several of them."""
    num_virtual_devices: Annotated[int, Field(ge=1, le=16)] | None = None
    """Split the CPU into this many logical devices, to rehearse a strategy on a machine without accelerators."""
    cross_device: Literal["auto", "one_device", "hierarchical_copy", "nccl"] = "auto"
    """How `mirrored` adds gradients over devices. `auto`: NCCL between GPUs, on one device between CPUs."""
    communication: Literal["auto", "ring", "nccl"] = "auto"
    """How `multi_worker_mirrored` adds gradients over workers."""
    bytes_per_pack: Annotated[int, Field(ge=0)] = 0
    """`multi_worker_mirrored` adds gradients in packs of about this many bytes, the last layers' first, while those of the
    first layers are still being computed. 0: all at once when all are there."""
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
    tensorboard_dir: Place | None = None
    """Folder or `gs://` prefix for TensorBoard's logs: scalars, the graph and the profile. None: none are written."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step that TensorFlow's profiler watches; the profile goes to `tensorboard_dir`."""
    cache_bytes: Annotated[int, Field(ge=0)] = 2 * 1024**3
    """A prepared split up to this size is held in memory; a larger one is streamed."""
    read_shards: Literal["staged", "streamed"] = "staged"
    """`staged`: shards are brought to this machine first and compared with their digests. `streamed`: TensorFlow itself reads
    them in the bucket where the run keeps its data, in every epoch, and no disk is needed."""
    shuffle_buffer_bytes: PositiveInt = 256 * 1024**2
    """Memory of the shuffle buffer when a split is streamed."""

    def problems(self) -> Iterator[Problem]:
        """Settings that exclude one another."""
        if (
            self.model not in _MODEL_NAMES
            and not IMPORT_PATH.fullmatch(self.model)
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
        if self.bytes_per_pack and strategy not in ("multi_worker_mirrored", "auto"):
            yield Problem("bytes_per_pack", self.bytes_per_pack, "acts under multi_worker_mirrored only")
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
