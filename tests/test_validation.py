"""Validation: every kind of anomaly is found where it is and nowhere else."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import DataConfig, Splits, ValidateConfig
from trainer.data.metadata_protos import SCHEMA_PROTO, STATISTICS_PROTO
from trainer.data.page import render_statistics
from trainer.data.prepare import prepare, sample
from trainer.data.schema import SCHEMA_FILE, infer_schema, read_schema
from trainer.data.statistics import Collector, read_statistics
from trainer.data.validation import chance, distance, validate
from trainer.errors import BadInput

PLAIN = ValidateConfig(min_examples_per_class=1)


def dataset(folder, name, rows, header="size,colour,label"):
    """A prepared dataset of rows, halves of which train and test; (manifest, statistics)."""
    (folder / f"{name}.csv").write_text("\n".join([header, *rows]) + "\n")
    config = DataConfig(
        source="csv", path=str(folder / f"{name}.csv"), label_key="label",
        splits=Splits(train="50%", validation=None, test="50%"),
    )  # fmt: skip
    manifest = prepare(config, 7, folder / name)
    return manifest, read_statistics(folder / name, manifest)


def rows(count=2000, size=lambda n: n % 100, colour=lambda n: ["red", "green"][n % 2], label=lambda n: "ab"[n % 2]):
    order = list(range(count))
    random.Random(3).shuffle(order)
    return [f"{size(n)}.{n:05d},{colour(n)},{label(n)}" for n in order]


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    return dataset(tmp_path_factory.mktemp("before"), "before", rows())


def checks(anomalies):
    return {(anomaly.check, anomaly.feature) for anomaly in anomalies}


def test_the_data_that_a_schema_was_made_from_keeps_it(before):
    manifest, statistics = before
    assert validate(PLAIN, manifest, statistics, infer_schema(manifest, statistics), statistics) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"size": lambda n: n % 100 if n % 50 else 900}, {("range", "size")}),
        ({"size": lambda n: n % 100 + 40}, {("drift", "size")}),
        ({"colour": lambda n: ["red", "green", "blue"][n % 3 if n % 10 == 0 else n % 2]}, {("new_values", "colour")}),
        ({"colour": lambda n: "" if n % 9 == 0 else ["red", "green"][n % 2]}, {("presence", "colour")}),
        ({"colour": lambda n: "red" if n % 5 else "green"}, {("drift", "colour")}),
        ({"label": lambda n: "a" if n % 5 else "b"}, {("drift", "label")}),
        ({"label": lambda n: "abc"[n % 3 if n % 10 == 0 else n % 2]}, {("new_values", "label")}),
    ],
)
def test_what_changed_is_found_and_nothing_else(tmp_path, before, changed, expected):
    manifest, statistics = dataset(tmp_path, "now", rows(**changed))
    found = validate(PLAIN, manifest, statistics, infer_schema(*before), before[1])
    assert checks(found) == expected
    for anomaly in found:
        assert anomaly.expected
        assert anomaly.found
        assert anomaly.split in ("train", "test")


def test_a_feature_that_is_new_gone_or_of_another_kind_is_an_error(tmp_path, before):
    lines = [f"word{n % 3},{n},{'ab'[n % 2]}" for n in range(200)]
    manifest, statistics = dataset(tmp_path, "now", lines, header="size,weight,label")
    found = validate(PLAIN, manifest, statistics, infer_schema(*before))
    assert {("type", "size"), ("type", "weight"), ("presence", "colour")} <= checks(found)
    assert {anomaly.severity for anomaly in found if anomaly.check in ("type", "presence")} == {"error"}


def test_splits_that_differ_too_few_examples_and_leakage_are_found_without_a_schema(tmp_path):
    for split, shift in (("train", 0), ("test", 60)):
        lines = [f"{n % 100 + shift},red,{'ab'[n % 2] if n else 'c'}" for n in range(1000)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["size,colour,label", *lines]) + "\n")
    config = DataConfig(
        source="csv", path=str(tmp_path), label_key="label",
        splits=Splits(train="train.csv", validation=None, test="test.csv"),
    )  # fmt: skip
    manifest = prepare(config, 7, tmp_path / "out")
    found = validate(ValidateConfig(), manifest, read_statistics(tmp_path / "out", manifest))
    assert checks(found) == {("skew", "size"), ("few_examples", "label"), ("leakage", "(all features)")}
    assert all(anomaly.severity == "warning" for anomaly in found)
    strict = ValidateConfig(severities={"leakage": "error", "skew": "off"})
    found = validate(strict, manifest, read_statistics(tmp_path / "out", manifest))
    assert next(anomaly.check for anomaly in found) == "leakage"
    assert "skew" not in {anomaly.check for anomaly in found}


def counted(kind, values):
    collector = Collector(kind)
    collector.add(values)
    return collector.result()


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=80), st.lists(st.integers(-5, 5), min_size=1, max_size=80))
def test_distances_lie_between_0_and_1_and_are_0_for_the_same(one, other):
    for kind, values in (("number", [one, other]), ("category", [list(map(str, one)), list(map(str, other))])):
        first, second = (counted(kind, part) for part in values)
        names = ["jensen_shannon", "l_infinity" if kind == "category" else "kolmogorov_smirnov"]
        for name in names:
            assert distance(name, first, first) == pytest.approx(0, abs=1e-12)
            assert 0 <= distance(name, first, second) <= 1
            assert distance(name, first, second) == pytest.approx(distance(name, second, first))


def test_the_kolmogorov_smirnov_distance_is_that_of_scipy():
    from scipy.stats import ks_2samp

    random_numbers = np.random.default_rng(1)
    one, other = random_numbers.normal(0, 1, 4000), random_numbers.normal(0.4, 1.2, 3000)
    found = distance("kolmogorov_smirnov", counted("number", one), counted("number", other))
    assert found == pytest.approx(ks_2samp(one, other).statistic, abs=0.012)


def test_small_samples_of_one_distribution_are_not_called_drift():
    random_numbers = np.random.default_rng(2)
    for _ in range(200):
        one, other = random_numbers.normal(size=30), random_numbers.normal(size=40)
        assert distance("kolmogorov_smirnov", counted("number", one), counted("number", other)) < 0.1 + chance(30, 40)


def test_a_schema_in_a_file_says_the_same_and_a_wrong_one_is_refused(before):
    schema = infer_schema(*before)
    assert read_schema(schema.to_text(), path="schema.json") == schema
    with pytest.raises(BadInput, match=r"schema.json.features.size.lowest = 3: unknown key"):
        read_schema(json.dumps({**json.loads(schema.to_text()), "features": {"size": {"kind": "number", "lowest": 3}}}),
                    path="schema.json")  # fmt: skip


def test_the_standard_protos_say_what_the_statistics_say(tmp_path):
    from google.protobuf import text_format
    from tensorflow_metadata.proto.v0 import schema_pb2, statistics_pb2

    manifest, statistics = dataset(tmp_path, "now", rows(200))
    read = statistics_pb2.DatasetFeatureStatisticsList.FromString((tmp_path / "now" / STATISTICS_PROTO).read_bytes())
    assert [(one.name, one.num_examples) for one in read.datasets] == [("train", 100), ("test", 100)]
    by_name = {feature.path.step[0]: feature for feature in read.datasets[0].features}
    assert by_name["size"].num_stats.mean == statistics.splits["train"]["size"].mean
    assert sum(bucket.sample_count for bucket in by_name["size"].num_stats.histograms[0].buckets) == 100
    assert {value.value for value in by_name["colour"].string_stats.top_values} == {"red", "green"}
    schema = text_format.Parse((tmp_path / "now" / SCHEMA_PROTO).read_text(), schema_pb2.Schema())
    rules = {feature.name: feature for feature in schema.feature}
    assert list(rules["colour"].string_domain.value) == ["green", "red"]
    assert rules["size"].float_domain.max > 99
    assert read_schema((tmp_path / "now" / SCHEMA_FILE).read_text(), path="x") == infer_schema(manifest, statistics)


def test_the_page_shows_everything_escaped_and_loads_nothing(tmp_path):
    manifest, statistics = dataset(tmp_path, "now", rows(200, colour=lambda n: ["<script>x()</script>", "b"][n % 2]))
    found = validate(ValidateConfig(min_examples_per_class=1000), manifest, statistics)
    page = render_statistics(manifest, statistics, sample(tmp_path / "now", manifest), found)
    assert "<script>x()" not in page
    assert "&lt;script&gt;x()" in page
    assert "at least 1000 examples of each class" in page
    assert "http" not in page.replace("Content-Security-Policy", "").replace("http-equiv", "")
    assert (tmp_path / "now" / "statistics.html").read_text() == render_statistics(
        manifest, statistics, sample(tmp_path / "now", manifest)
    )


def test_an_error_ends_the_run_and_leaves_anomalies_and_page(tmp_path, before, capsys):
    from trainer import tasks

    manifest, _ = dataset(tmp_path, "now", rows(colour=lambda n: "" if n % 2 else "red"))
    places = {name: SimpleNamespace(path=str(tmp_path / name)) for name in ("now", "anomalies", "page.html")}
    with pytest.raises(SystemExit) as ended:
        tasks.validate_data(
            PLAIN.to_json(), infer_schema(*before).to_text(), "tiny", str(tmp_path / "models"), *places.values()
        )
    assert ended.value.code == 2
    assert "colour (train): expected at most 0.0% missing, found" in capsys.readouterr().err
    listed = json.loads((tmp_path / "anomalies" / "anomalies.json").read_text())
    assert listed[0]["check"] == "presence"
    assert manifest.digest in (tmp_path / "page.html").read_text()
