"""The page for platform engineers: what it shows can be applied, parsed and run."""

import re
import shlex

import pytest
import yaml
from conftest import REPOSITORY

from pipelines import cli
from pipelines.config import Config, load_config
from pipelines.training import compile_pipeline

PAGE = (REPOSITORY / "docs" / "operations.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
SHELL = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).splitlines()
COMMANDS = [line for line in SHELL if line.startswith("trireme")]


def test_every_manifest_is_whole_and_roles_and_bindings_fit():
    documents = [document for block in BLOCKS for document in yaml.safe_load_all(block)]
    manifests = [one for one in documents if "kind" in one]
    assert all(one["apiVersion"] and one["metadata"]["name"] for one in manifests)
    named = {(one["kind"], one["metadata"]["name"]) for one in manifests}
    for binding in (one for one in manifests if one["kind"] == "RoleBinding"):
        assert ("Role", binding["roleRef"]["name"]) in named
        assert {("ServiceAccount", subject["name"]) for subject in binding["subjects"]} <= named


def test_the_runs_account_may_read_what_kubeflows_driver_asks_for():
    documents = [document for block in BLOCKS for document in yaml.safe_load_all(block)]
    (role,) = (one for one in documents if one.get("kind") == "Role" and one["metadata"]["name"] == "trainer")
    allowed = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    # The driver ends when it is forbidden to look for its optional settings; a missing ConfigMap is no trouble to it.
    assert {("configmaps", "get"), ("pods", "get"), ("workflowtaskresults", "create")} <= allowed


def test_the_configuration_is_valid_compiles_and_names_only_secrets_that_the_page_makes(tmp_path):
    (text,) = (block for block in BLOCKS if block.startswith("name:"))
    (tmp_path / "digits.yaml").write_text(text)
    config: Config = load_config(tmp_path / "digits.yaml")
    compile_pipeline(config, tmp_path / "pipeline.yaml")
    documents = [document for block in BLOCKS for document in yaml.safe_load_all(block)]
    secrets = {one["metadata"]["name"] for one in documents if one.get("kind") == "Secret"}
    assert {channel.secret for channel in config.notify.channels} | set(config.cluster.pull_secrets) <= secrets
    accounts = {one["metadata"]["name"] for one in documents if one.get("kind") == "ServiceAccount"}
    assert config.cluster.service_account in accounts


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_can_be_parsed(command):
    words = shlex.split(command.partition("||")[0])[1:]
    assert callable(cli._parser().parse_args(words).command)


def test_every_verb_stands_on_the_page():
    for verb in (
        "apply",
        "diff",
        "list",
        "preview",
        "pause",
        "resume",
        "run-now",
        "delete",
        "status",
        "retry",
        "cancel",
    ):
        assert f"`{verb}`" in PAGE or f" {verb}`" in PAGE or f" {verb} " in PAGE
