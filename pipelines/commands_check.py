"""The commands that say beforehand whether a run can work, and what of it would come from the cache."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pipelines.commands_kubeflow import access_flags, connect
from pipelines.flags import exit_codes
from trainer.errors import EXIT_DONE, TriremeError

if TYPE_CHECKING:
    from pipelines.config import Config

_PATIENCE_SECS = 15.0  # with storage that does not answer: somebody waits, and can ask again


def register(commands: argparse._SubParsersAction, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `check` and `explain-cache` to the command line."""
    check = command(
        commands,
        "check",
        _check,
        "say whether a configuration can work, without running it",
        exit_codes().replace("2 bad input", "2 bad input, or a finding failed"),
    )
    check.add_argument("--json", action="store_true", help="print one line of JSON")
    check.add_argument("--target", choices=("local", "kubeflow"), default="local",
                       help="where it is to run: kubeflow also looks at the root, the schedules and the server"
                            " (default: %(default)s)")  # fmt: skip
    access_flags(check)

    explain = command(commands, "explain-cache", _explain,
                      "say what each task's cache key is made of, and what changed since the last run")  # fmt: skip
    explain.add_argument("--json", action="store_true", help="print one line of JSON")
    explain.add_argument(
        "--offline",
        action="store_true",
        help="ask no server, and compare with nothing (only runs on a server take tasks from a cache)",
    )
    explain.add_argument("--run", default="latest", metavar="RUN", help="run to compare with (default: %(default)s)")
    access_flags(explain)


def _check(arguments: argparse.Namespace) -> int:
    from pipelines import checks
    from pipelines.config import load_config
    from trainer.storage import patience

    config = load_config(arguments.config, arguments.overrides)
    # What a builder of one's own prints when it is imported must not stand between the findings.
    with patience(_PATIENCE_SECS), contextlib.redirect_stdout(sys.stderr):
        findings = checks.check(config, is_for_cluster=arguments.target == "kubeflow")
        if arguments.target == "kubeflow":
            from pipelines.targets.access import system_clock

            findings += checks.check_cluster(config, system_clock().now(), lambda: connect(arguments, config))
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], ensure_ascii=False))
    else:
        for finding in findings:
            print(f"{finding.state:<8}{finding.subject}: {finding.message}")
    return checks.exit_code_of(findings)


def _explain(arguments: argparse.Namespace) -> int:
    import tempfile
    from pathlib import Path

    import yaml

    from pipelines.cache_keys import cache_keys, changes, following
    from pipelines.config import load_config
    from pipelines.targets import kubeflow
    from pipelines.training import parameters_of

    config = load_config(arguments.config, arguments.overrides)
    with tempfile.TemporaryDirectory() as folder:
        text = kubeflow.compiled(config, Path(folder)).read_text(encoding="utf-8")
    keys = cache_keys(next(iter(yaml.safe_load_all(text))), parameters_of(config))
    run, before, data, unseen = None, {}, None, None
    if not arguments.offline:
        server = connect(arguments, config)
        experiment = kubeflow.find_experiment(server, kubeflow.experiment_of(config))
        if arguments.run != "latest" or (experiment and next(kubeflow.runs(server, experiment), None)):
            run = kubeflow.find_run(server, config, arguments.run)
            before = _keys_of(server, run)
            data, unseen = _data_since(config, run, server.clock.now())
    again: set[str] = set()
    rows = {}
    for name, key in keys.items():
        changed = None
        if run and key.cached:
            changed = changes(key, before.get(name)) + following(key, again)
            if data and "from fingerprint-data.Output" in key.parts.values():
                changed.insert(0, data)
            if changed:
                again.add(name)
        rows[name] = {
            "cached": key.cached,
            "parts": key.parts,
            "changes": changed,
            "then": _ended_as(run, name) if run else None,
        }
    if arguments.json:
        found = {"compared_with": run.run_id if run else None, "data_unknown": unseen, "tasks": rows}
        print(json.dumps(found, ensure_ascii=False))
        return EXIT_DONE
    print(f"compared with {run.display_name} ({run.run_id})" if run else "compared with no run")
    if unseen:
        print(f"whether the data changed cannot be told from here: {unseen}")
    for name, row in rows.items():
        print(_row(name, row, bool(unseen)))
    return EXIT_DONE


def _data_since(config: "Config", run: Any, now: datetime) -> tuple[str | None, str | None]:
    """What became of the data's files since a run, and why that cannot be told, of which at least one is None."""
    from pipelines.cache_keys import data_change
    from pipelines.targets import kubeflow
    from trainer import outcome, storage
    from trainer.data.fingerprint import digest_of, is_seen, source_of, wanted_files
    from trainer.data.window import settled

    source = source_of(config.data)
    if source is None:
        return None, None
    root = kubeflow.root_in(run) or config.cluster.pipeline_root
    section = settled(config.data, now)
    try:
        with storage.patience(_PATIENCE_SECS):
            then = outcome.read(root, run.run_id).get("data") if root else None
            if then is None:
                return None, f"the run left no word of its files in {root}"
            if not is_seen(source):
                return None, f"there is no {source} on this machine"
            files = wanted_files(source, section.window)
    except TriremeError as error:
        return None, str(error).splitlines()[0]
    until = section.window.until if section.window else None
    return data_change(source, then, {"until": until, "digest": digest_of(files), "num_files": len(files)}), None


def _row(name: str, row: dict[str, Any], unseen: bool) -> str:
    if not row["cached"]:
        return f"{name:<18} always runs: it depends on the champion, on files, or on its run"
    if row["changes"] is None:
        lines = [f"{name:<18} may come from the cache"]
    elif row["changes"]:
        lines = [f"{name:<18} runs again", *(f"    changed  {change}" for change in row["changes"])]
    elif row["then"] != "succeeded":
        lines = [f"{name:<18} has the same key, but {row['then']} in that run: only an earlier run can have left it"]
    else:
        looked = "from fingerprint-data.Output" in row["parts"].values()
        files = "the files are the same, and " if looked and unseen else ""
        same = "; its files are the same" if looked and not unseen else ""
        lines = [f"{name:<18} comes from the cache, if {files}what is made before it does and is still there{same}"]
    for part, value in row["parts"].items():
        text = value if isinstance(value, str) else json.dumps(value)
        lines.append(f"    {part:<10} {text if len(text) <= 90 else text[:87] + '...'}")
    return "\n".join(lines)


def _ended_as(run: Any, name: str) -> str:
    """What became of a task in a run: only what succeeded is in the cache."""
    from pipelines.targets import kubeflow

    if run.state == "SUCCEEDED":
        return "succeeded"
    state = next((task["state"] for task in kubeflow.tasks_of(run) if task["name"] == name), None)
    if state in ("SUCCEEDED", "SKIPPED", "CACHED"):
        return "succeeded"
    otherwise = "has not ended" if run.state in kubeflow.IN_FLIGHT else "did not run"
    return {"FAILED": "failed", "CANCELED": "was cancelled"}.get(state or "", otherwise)


def _keys_of(server: Any, run: Any) -> dict[str, Any]:
    from pipelines.cache_keys import cache_keys

    reference = run.pipeline_version_reference
    version = server.call(
        "show the run's version",
        lambda client: client.get_pipeline_version(reference.pipeline_id, reference.pipeline_version_id),
    )
    spec = version.pipeline_spec
    spec = spec.get("pipeline_spec", spec)  # where there are settings of pods, the server keeps both documents
    return cache_keys(spec, (run.runtime_config.parameters if run.runtime_config else None) or {})
