"""The configuration: every message, all at once, and nothing that cannot work gets through."""

import json

import pytest
import yaml
from conftest import REPOSITORY

from pipelines.config import Config, json_schema, load_config
from trainer.config import DataConfig, TrainConfig, parse, parse_json
from trainer.errors import BadInput


def refusal(file, overrides=()):
    with pytest.raises(BadInput) as refused:
        load_config(file, overrides)
    return str(refused.value)


def test_the_default_configuration_is_valid_and_says_what_it_means():
    config = load_config(REPOSITORY / "configs" / "digits.yaml")
    assert config.train.learning_rate == 0.002  # written 2e-3, which YAML 1.1 takes for text
    assert config.data.splits.validation == "train[90%:]"


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_every_configuration_that_is_shipped_is_valid_and_points_editors_at_the_schema(file):
    load_config(file)
    assert file.read_text().startswith("# yaml-language-server: $schema=schema.json\n")


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    [
        ({"num_workers": 2}, "auto"),
        ({"num_workers": 2, "num_parameter_servers": 1}, "auto"),
        ({"gpu": {"type": "nvidia-l4", "count": 2}}, "auto"),
        ({"accelerator": {"count": 4}}, "auto"),
        ({"accelerator": {"count": 1}}, "default"),
        ({"num_workers": 1}, "default"),
    ],
)
def test_several_processes_need_no_word_about_the_strategy(tmp_path, cluster, strategy):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"name": "digits", "cluster": cluster}))
    assert load_config(file).train.strategy == strategy
    assert load_config(file, ["train.epochs=3"]).train.strategy == strategy


def test_the_schema_that_editors_read_is_the_one_of_this_code():
    assert (REPOSITORY / "configs" / "schema.json").read_text() == json_schema()


def test_the_schema_describes_every_setting():
    schema = json.loads(json_schema())
    sections = [schema, *schema["$defs"].values()]
    fields = [field for section in sections for field in section.get("properties", {}).items()]
    assert len(fields) > 40
    assert all(section["description"] for section in sections)
    assert [name for name, field in fields if not (field.get("description") or field.get("$ref"))] == []


def test_a_section_survives_the_way_to_its_component_unchanged():
    section = parse(
        TrainConfig,
        {"epochs": 3, "model_args": {"hidden_units": [2**53 + 1, 8]}, "clip_norm": 1.0, "early_stopping": {}},
    )
    assert parse_json(TrainConfig, section.to_json()) == section
    assert parse_json(TrainConfig, section.to_json()).to_json() == section.to_json()


def test_a_section_cannot_be_changed_after_it_was_validated():
    with pytest.raises(ValueError, match="frozen"):
        DataConfig().name = "mnist"


def test_everything_that_is_wrong_is_reported_at_once_with_line_path_value_and_rule(configuration):
    file = configuration(
        "name: Tiny\n"
        "train:\n"
        "  epochs: 0\n"
        "  learning_rate: .nan\n"
        "  global_batch_size: '64'\n"
        "  clip_norm: 1.0\n"
        "  clip_value: 2.0\n"
        "  epohs: 3\n"
        "data:\n"
        "  splits: {train: 'train[:110%]'}\n"
        "paint: blue\n"
    )
    assert refusal(file).splitlines() == [
        f'{file}:1: name = "Tiny": must be lower-case letters, digits and hyphens, at most 63, a letter first',
        f"{file}:3: train.epochs = 0: must be at least 1",
        f'{file}:5: train.global_batch_size = "64": must be a whole number',
        f"{file}:4: train.learning_rate = nan: must be a finite number",
        f"{file}:8: train.epohs = 3: unknown key; did you mean epochs?",
        f'{file}:11: paint = "blue": unknown key',
        f'{file}:10: data.splits.train = "train[:110%]": 110% is over 100 %',
        f"{file}:6: train.clip_norm = 1.0: only one kind of clipping can act, and clip_value is set too",
    ]


def test_a_wrong_setting_is_not_said_to_be_missing_by_another(configuration):
    settings = ["cluster.launcher=trainjob", "cluster.gang=kueue", "cluster.queue=A_B"]
    assert refusal(configuration(), settings) == (
        '--set: cluster.queue = "A_B": must be a Kubernetes name: lower-case letters, digits, hyphens and dots'
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.epochs=yes", 'train.epochs = "yes": must be a whole number'),
        ("train.epochs=1.5", "train.epochs = 1.5: must be a whole number"),
        ("train.epochs=true", "train.epochs = true: must be a whole number"),
        ("train.learning_rate=.inf", "train.learning_rate = inf: must be a finite number"),
        ("train.learning_rate=-1", "train.learning_rate = -1: must be greater than 0.0"),
        ("train.global_batch_size=0", "train.global_batch_size = 0: must be at least 1"),
        ("train.strategy=miror", "train.strategy = \"miror\": must be one of 'auto', 'default', 'one_device'"),
        ("train.num_virtual_devices=1000", "train.num_virtual_devices = 1000: must be at most"),
        ("train.model=cnnn", 'train.model = "cnnn": must be one of cnn, mlp'),
        ("train.label_smoothing=1", "train.label_smoothing = 1: must be less than 1.0"),
        ("data.splits.train=train[50%:40%]", "holds no examples: it ends at or before its start"),
        ("data.splits.test=te st", "must be a split expression such as train, train[:90%]"),
        ("data.name=di gits", 'data.name = "di gits": must be builder, builder/config or'),
        ("data.image_size=[8]", "data.image_size"),
        ("data.image_size=[8, 0]", "data.image_size.1 = 0: must be at least 1"),
        ("evaluate.thresholds.accuracy.value_threshold=2", "accuracy lies between 0 and 1"),
        (
            "evaluate.thresholds.macro_f1={value_threshold: 1, confidence: bound}",
            "the lower end of an interval is below 1",
        ),
        (
            "evaluate.thresholds.accuracy.change_threshold=2",
            "change_threshold = 2.0: accuracy lies between 0 and 1, so two mo",
        ),
        ("evaluate.thresholds.roc_auc.change_threshold=-1.5", "two models differ by at most 1"),
        ("evaluate.thresholds.brier.value_threshold=2.5", "value_threshold = 2.5: brier lies between 0 and 2"),
        ("evaluate.thresholds.loss.value_threshold=-1", "value_threshold = -1.0: loss is at least 0"),
        ("evaluate.thresholds.r2.value_threshold=1.5", "value_threshold = 1.5: r2 is at most 1"),
        (
            "evaluate.thresholds.loss={change_threshold: 1.5, relative: true}",
            "none is better by more than the cham",
        ),
        (
            "evaluate.thresholds.accuracy={change_threshold: -2, relative: true}",
            "none is worse by more than the cham",
        ),
        (
            "evaluate.slices=[{by: [label], thresholds: {accuracy: {change_threshold: 3}}}]",
            "evaluate.slices.0.thresholds.accuracy.change_threshold = 3.0: accuracy lies between",
        ),
        ("evaluate.thresholds.speed.value_threshold=2", "evaluate.thresholds.speed"),
        ("evaluate.thresholds.loss={}", "a threshold needs value_threshold, change_threshold or both"),
        ("evaluate.thresholds.acuracy.value_threshold=0.5", "did you mean accuracy?"),
        ("evaluate.thresholds.accuracy={value_threshold: 0.5, relative: true}", "says how change_threshold is meant"),
        ("evaluate.thresholds.pinball_0.5={value_threshold: 1.0}", "evaluate.thresholds.pinball_0"),
        ("evaluate.thresholds.accuracy={value_threshold: 0.5, confidence: often}", "'estimate' or 'bound'"),
        ("evaluate.slices=[{by: []}]", "evaluate.slices.0.by = []: a slicing needs either by or function"),
        ("evaluate.slices=[{by: [a], function: 'm:f'}]", "a slicing needs either by or function"),
        ("evaluate.slices=[{by: [a], bins: {b: [1.0]}}]", "evaluate.slices.0.bins.b = [1.0]: is not among by"),
        ("evaluate.slices=[{by: [a], bins: {a: [2.0, 1.0]}}]", "edges must grow"),
        ("evaluate.slices=[{function: nothing}]", "must be package.module:function"),
        ("evaluate.slices=[{by: [a], thresholds: {speed: {value_threshold: 1}}}]", "slices.0.thresholds.speed"),
        ("evaluate.own_metrics={loss: {function: 'm:f'}}", "is the name of a metric that is there already"),
        ("evaluate.own_metrics={cost: {function: money}}", "evaluate.own_metrics.cost.function"),
        ("evaluate.quantiles=[1.0]", "must be less than 1"),
        ("evaluate.confidence_level=0.2", "must be at least 0.5"),
        ("serving.num_requests=1", "must be at least 20"),
        ("serving.max_p99_ms=0", "must be greater than 0"),
        ("cluster.cpu='0'", 'cluster.cpu = "0": must be a Kubernetes quantity over zero'),
        ("cluster.memory=0.0Gi", 'cluster.memory = "0.0Gi": must be a Kubernetes quantity over zero'),
        ("cluster.gpu={type: ''}", 'cluster.gpu.type = "": must be what the label of the nodes says'),
        ("cluster.pipeline_root=s3://b/x", "it; no other storage is known, S3 and MinIO neither"),
        ("cluster.pipeline_root=gs:/b/x", "must be a folder, or gs:// with a bucket's name after it"),
        ("push.registry=azure://b/x", 'push.registry = "azure://b/x": must be a folder, or gs://'),
        ("train.tensorboard_dir=gs:///x", 'train.tensorboard_dir = "gs:///x": must be a folder, or gs://'),
        ("data.data_dir=https://b/x", 'data.data_dir = "https://b/x": must be a folder, or gs://'),
        ("kubeflow.namespace=Bad Name", 'kubeflow.namespace = "Bad Name": must be the name of a namespace'),
        ("kubeflow.host=http://h:99999", 'kubeflow.host = "http://h:99999": must be an address'),
        ("cluster.memory=lots", 'cluster.memory = "lots": must be a Kubernetes quantity'),
        ("cluster.memory=1ki", 'cluster.memory = "1ki": must be a Kubernetes quantity'),  # 1k or 1Ki
        ("cluster.pipeline_root=s3://b/x", 'cluster.pipeline_root = "s3://b/x": must be a folder, or gs://'),
        ("seed=-1", "seed = -1: must be at least 0"),
        ("train=3", "train = 3: must be a mapping of settings"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_path_value_and_rule(configuration, setting, message):
    text = refusal(configuration(), [setting])
    assert message in text
    assert text.startswith("--set: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["cluster.accelerator={count: 4}", "train.strategy=default"],
            "would leave 3 of 4 accelerators idle; use mirrored",
        ),
        (
            ["train.strategy=mirrored", "train.num_virtual_devices=2", "cluster.accelerator={}"],
            "is for rehearsing without accelerators",
        ),
        (["train.early_stopping={}", "data.splits.validation=null"], "needs a validation split"),
        (["train.gradient_accumulation_steps=65"], "must not exceed global_batch_size (64)"),
        (
            ["train.strategy=mirrored", "train.num_virtual_devices=4", "train.global_batch_size=3"],
            "must give every replica an example",
        ),
        (["train.optimizer_args={learning_rate: 1}"], "belongs to train.learning_rate"),
        (
            ["cluster.timeout_secs=300", "cluster.num_workers=2"],
            "cluster.timeout_secs = 300: ends the training before its processes have waited for one another"
            " (cluster.start_timeout_secs is 600)",
        ),
        (
            ["cluster.timeout_secs=600", "cluster.launcher=trainjob"],
            "cluster.timeout_secs = 600: ends the training before",
        ),
    ],
)
def test_a_combination_that_cannot_work_is_refused(configuration, settings, message):
    assert message in refusal(configuration(), settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["cluster.timeout_secs=300"],  # one process waits for nobody
        ["cluster.timeout_secs=300", "cluster.num_workers=2", "cluster.start_timeout_secs=60"],
    ],
)
def test_a_limit_that_leaves_time_to_start_is_no_problem(configuration, settings):
    load_config(configuration(), settings)


@pytest.mark.parametrize(
    "threshold",
    [
        "accuracy={change_threshold: 1.5, relative: true}",  # from 0.1 to 0.25
        "accuracy={value_threshold: 1.0, change_threshold: -1}",
        "brier={value_threshold: 1.5}",
        "r2={value_threshold: -3, change_threshold: 7}",
        "loss={value_threshold: 40, change_threshold: -30}",
        "loss={change_threshold: -3, relative: true}",
        "cost={value_threshold: -5, change_threshold: 80}",  # of one's own nothing is known
    ],
)
def test_a_threshold_that_some_model_reaches_and_some_misses_is_taken(configuration, threshold):
    own = "evaluate.own_metrics.cost.function=money:cost"
    load_config(configuration(), [own, f"evaluate.thresholds.{threshold}"])


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", ":2: name stands twice; remove one"),
        ("name: [a\n", "is not valid YAML"),
        ("- a\n", "must be a mapping of settings, and is a list"),
        ("\n", "must be a mapping of settings, and is empty"),
        ("hello\n", "must be a mapping of settings, and is text"),
        (
            "name: a\n---\nname: b\n",
            ":2: is not valid YAML: expected a single document in the stream, but found another",
        ),
        ("name: !!python/object:os.system a\n", ":1: !!python/object:os.system is no kind of value here"),
        ("name: a\ndata: {input_keys: !!set {a, b}}\n", ":2: !!set is no kind of value here"),
        ("name: !!binary aGVsbG8=\n", "!!binary is no kind of value here"),
        ("name: !!timestamp 2027-01-01\n", "!!timestamp is no kind of value here"),
        ("name: a\nseed: " + "9" * 5000 + "\n", ":2: seed is a number of 5,000 digits"),
        ('name: "\\ud800"\n', ":1: name is not valid Unicode"),
        ("name: a\ndata: {input_keys: &keys [a, *keys]}\n", "is nested too deeply"),
        (BOMB, "holds more than 100,000 values, counting what aliases repeat"),
        ("1: a\n", "keys must be text"),
        ("seed: 3\n", "name = null: must be given"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused(configuration, text, message):
    assert message in refusal(configuration(text))


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    assert "cannot be read: No such file" in refusal(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"name: \xff\xfe")
    assert "is not UTF-8 text" in refusal(tmp_path / "binary.yaml")


@pytest.mark.parametrize("setting", ["train.epochs", "=3", "train..epochs=3", "name.x=3", "train.epochs=[1"])
def test_an_override_that_makes_no_sense_is_refused(configuration, setting):
    assert f"--set {setting}" in refusal(configuration(), [setting])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.epochs=" + "9" * 5000, "--set epochs: the value is a number of 5,000 digits"),
        ("name=!!binary aGVsbG8=", "--set name: !!binary is no kind of value here"),
        ("data.input_keys=!!set {a}", "--set input_keys: !!set is no kind of value here"),
        ("data.input_keys=&keys [*keys]", "--set input_keys: is nested too deeply"),
    ],
)
def test_an_override_is_read_as_strictly_as_a_file(configuration, setting, message):
    assert message in refusal(configuration(), [setting])


def test_what_is_wrong_is_not_called_missing_as_well(configuration):
    text = refusal(configuration("name: a\nschedules: {w: {cron: 5}}\n"))
    assert text.splitlines() == [text]
    assert "schedules.w.cron = 5: must be text" in text


def test_an_override_reaches_where_the_file_says_nothing(configuration):
    config = load_config(configuration("name: a\n"), ["train.optimizer_args.beta_1=0.8", "data.splits.validation=null"])
    assert config.train.optimizer_args == {"beta_1": 0.8}
    assert config.data.splits.validation is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("no", "no"),
        ("1_000", "1_000"),
        ("012", 12),
        ("0x10", 16),
        ("null", None),
        ("2026-01-01", "2026-01-01"),
    ],
)
def test_scalars_are_read_as_yaml_1_2(configuration, text, value):
    from trainer.config_file import read_config_file

    data, _ = read_config_file(configuration(f"name: {text}\n"))
    assert data["name"] == value
    assert type(data["name"]) is type(value)


def test_a_whole_configuration_written_out_reads_back_as_the_same(configuration):
    config = load_config(REPOSITORY / "configs" / "digits.yaml")
    again = load_config(configuration(yaml.safe_dump(config.model_dump(mode="json"))))
    assert again == config
    assert isinstance(again, Config)
