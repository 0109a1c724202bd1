"""What a person decides: one closed, frozen section per step. Imports no TensorFlow.

A section travels to its component as one JSON string, because a step's inputs are its cache key and because
Kubeflow Pipelines turns the integers of a dictionary into floats.
"""

from trainer.config.data import (
    SHARDS_FOR_MOST,
    CheckName,
    DataConfig,
    DataWindow,
    KindName,
    RecordFeature,
    SourceName,
    Splits,
    ValidateConfig,
)
from trainer.config.evaluate import EvaluateConfig, OwnMetric, ServingConfig, Slicing, Threshold
from trainer.config.launch import JOB_VARIABLE, JobConfig
from trainer.config.release import Channel, Event, NotifyConfig, PushConfig, RetrainConfig
from trainer.config.section import (
    OVERRIDDEN,
    Fraction,
    Place,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    parse,
    parse_json,
    suggestion,
    text,
)
from trainer.config.train import (
    Augmentation,
    EarlyStopping,
    GroupConfig,
    LearningRateSchedule,
    TrainConfig,
    WarmStart,
)

__all__ = [
    "JOB_VARIABLE",
    "OVERRIDDEN",
    "SHARDS_FOR_MOST",
    "Augmentation",
    "Channel",
    "CheckName",
    "DataConfig",
    "DataWindow",
    "EarlyStopping",
    "EvaluateConfig",
    "Event",
    "Fraction",
    "GroupConfig",
    "JobConfig",
    "KindName",
    "LearningRateSchedule",
    "NotifyConfig",
    "OwnMetric",
    "Place",
    "PositiveFloat",
    "PositiveInt",
    "Problem",
    "PushConfig",
    "RecordFeature",
    "RetrainConfig",
    "Section",
    "ServingConfig",
    "Slicing",
    "SourceName",
    "Splits",
    "Threshold",
    "TrainConfig",
    "ValidateConfig",
    "WarmStart",
    "parse",
    "parse_json",
    "suggestion",
    "text",
]
