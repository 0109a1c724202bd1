"""Statistics and schema as the protos of `tensorflow_metadata`, for the tools that read those.

write_protos(folder, manifest, statistics, schema)        # statistics.pb and schema.pbtxt
"""

from pathlib import Path
from typing import Any

from trainer.data.manifest import Manifest
from trainer.data.schema import FeatureSchema, Schema
from trainer.data.statistics import FeatureStatistics, Statistics

STATISTICS_PROTO = "statistics.pb"
SCHEMA_PROTO = "schema.pbtxt"

_MOST_TOP_VALUES = 1000


def write_protos(folder: Path, manifest: Manifest, statistics: Statistics, schema: Schema) -> None:
    """Writes a `DatasetFeatureStatisticsList` with one dataset a split, and a text `Schema`."""
    from google.protobuf import text_format

    data = statistics_proto(manifest, statistics).SerializeToString(deterministic=True)
    (folder / STATISTICS_PROTO).write_bytes(data)
    (folder / SCHEMA_PROTO).write_text(text_format.MessageToString(schema_proto(schema)), encoding="utf-8")


def statistics_proto(manifest: Manifest, statistics: Statistics) -> Any:
    """The statistics as `DatasetFeatureStatisticsList`."""
    from tensorflow_metadata.proto.v0 import statistics_pb2

    whole = statistics_pb2.DatasetFeatureStatisticsList()
    for split, by_name in statistics.splits.items():
        dataset = whole.datasets.add(name=split, num_examples=manifest.splits[split].num_examples)
        for name, found in by_name.items():
            _add_feature(dataset.features.add(), name, found)
    return whole


def schema_proto(schema: Schema) -> Any:
    """The schema as `Schema`."""
    from tensorflow_metadata.proto.v0 import schema_pb2

    whole = schema_pb2.Schema()
    for name, rule in [*schema.features.items(), (schema.label_name, schema.label)]:
        _add_rule(whole.feature.add(name=name), rule, schema_pb2)
    return whole


def _add_feature(feature: Any, name: str, found: FeatureStatistics) -> None:
    from tensorflow_metadata.proto.v0 import statistics_pb2

    types = statistics_pb2.FeatureNameStatistics
    feature.path.step.append(name)
    present = found.num_examples - found.num_missing
    counts = {"num_missing": found.num_missing, "num_non_missing": present, "min_num_values": 1, "max_num_values": 1}
    if found.kind == "number":
        feature.type = types.FLOAT
        _add_numbers(feature.num_stats, found, counts)
    elif found.kind == "category":
        feature.type = types.STRING
        feature.string_stats.common_stats.CopyFrom(statistics_pb2.CommonStatistics(**counts))
        feature.string_stats.unique = found.num_distinct or 0
        for place, value in enumerate(found.values[:_MOST_TOP_VALUES]):
            feature.string_stats.top_values.add(value=value.value, frequency=value.count)
            feature.string_stats.rank_histogram.buckets.add(
                low_rank=place, high_rank=place, label=value.value, sample_count=value.count
            )
    else:
        feature.type = types.BYTES if found.kind == "image" else types.STRING
        feature.bytes_stats.common_stats.CopyFrom(statistics_pb2.CommonStatistics(**counts))
        feature.bytes_stats.unique = found.num_distinct or 0
        measured = "pixel" if found.kind == "image" else "words"
        for key in ("mean", "std_dev", "low", "high"):
            if (value := getattr(found, key)) is not None:
                feature.custom_stats.add(name=f"{measured}_{key}", num=value)


def _add_numbers(numbers: Any, found: FeatureStatistics, counts: dict[str, int]) -> None:
    from tensorflow_metadata.proto.v0 import statistics_pb2

    numbers.common_stats.CopyFrom(statistics_pb2.CommonStatistics(**counts))
    if found.mean is None:
        return
    numbers.mean, numbers.std_dev = found.mean, found.std_dev
    numbers.num_zeros, numbers.min, numbers.max = found.num_zeros, found.low, found.high
    numbers.median = found.quantile(50)
    standard = numbers.histograms.add(type=statistics_pb2.Histogram.STANDARD)
    for bin_ in found.histogram:
        standard.buckets.add(low_value=bin_.low, high_value=bin_.high, sample_count=bin_.count)
    quantiles = numbers.histograms.add(type=statistics_pb2.Histogram.QUANTILES)
    for percent in range(0, 100, 10):
        low, high = found.quantile(percent), found.quantile(percent + 10)
        quantiles.buckets.add(
            low_value=low, high_value=high, sample_count=(found.num_examples - found.num_missing) / 10
        )


def _add_rule(feature: Any, rule: FeatureSchema, schema_pb2: Any) -> None:
    feature.type = schema_pb2.FLOAT if rule.kind == "number" else schema_pb2.BYTES
    feature.presence.min_fraction = 1.0 - rule.max_missing_fraction
    for size in rule.shape if rule.kind == "number" else ():
        feature.shape.dim.add(size=size)
    if rule.low is not None or rule.high is not None:
        if rule.low is not None:
            feature.float_domain.min = rule.low
        if rule.high is not None:
            feature.float_domain.max = rule.high
    elif rule.kind == "image":
        feature.image_domain.SetInParent()
    elif rule.kind == "text":
        feature.natural_language_domain.SetInParent()
    elif rule.values is not None:
        feature.string_domain.value.extend(rule.values)
        feature.distribution_constraints.min_domain_mass = 1.0 - rule.max_new_fraction
