"""The commands that upload, start and look at runs on a Kubeflow Pipelines server."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipelines.flags import count, exit_codes
from trainer.errors import EXIT_DONE, EXIT_NOT_BLESSED, TriremeError

if TYPE_CHECKING:
    from pipelines.config import Config
    from pipelines.targets.access import Server

_ACCESS = (
    "host",
    "namespace",
    "token_file",
    "token_command",
    "cookies_file",
    "ca_file",
    "client_certificate",
    "client_key",
)


def register(commands: argparse._SubParsersAction, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `upload`, `submit` and `runs` to the command line."""
    upload = command(commands, "upload", _upload, "upload the pipeline as a version named by its content")
    upload.add_argument(
        "--copy-to",
        metavar="URI",
        help="gs:// prefix where the compiled pipeline is stored too, by its digest (default: none)",
    )
    _common(upload)

    of_a_run = exit_codes("the run failed", True, "interrupted (Ctrl-C), or the run was cancelled")
    submit = command(commands, "submit", _submit, "start a run on the server", of_a_run)
    submit.add_argument(
        "--as-of",
        metavar="MOMENT",
        help="take the data window as it was then, such as 2027-01-29T03:00Z (default: now)",
    )
    submit.add_argument("--wait", action="store_true", help="wait for its end and exit as the run did")
    submit.add_argument("--experiment", metavar="NAME", help="group of runs (default: the pipeline's name)")
    submit.add_argument(
        "--root", metavar="URI", help="where data, checkpoints and models are (default: cluster.pipeline_root)"
    )
    submit.add_argument(
        "--fail-unless-blessed", action="store_true", help="with --wait: exit with 3 when the model is not blessed"
    )
    _common(submit)

    runs = commands.add_parser("runs", help="list, show, watch, cancel or retry runs on the server",
                               description="List, show, watch, cancel or retry runs on the server.")  # fmt: skip
    verbs = runs.add_subparsers(title="verbs", metavar="VERB", required=True)
    listing = command(verbs, "list", _list, "list the newest runs with their verdicts")
    listing.add_argument(
        "-n", dest="count", type=count, default=10, metavar="N", help="how many (default: %(default)s)"
    )
    _common(listing, experiment=True)
    for name, function, summary in (
        ("show", _show, "show a run: tasks, verdict, metrics"),
        ("cancel", _cancel, "stop a run"),
        ("retry", _retry, "start the failed tasks of a run again"),
    ):
        verb = command(verbs, name, function, summary)
        verb.add_argument("run", metavar="RUN", help="identifier, name, the beginning of either, or `latest`")
        _common(verb, experiment=True)
    watch = command(verbs, "watch", _watch, "wait for a run's end and exit as it did", of_a_run)
    watch.add_argument("run", metavar="RUN", help="identifier, name, the beginning of either, or `latest`")
    _common(watch, experiment=True)
    watch.add_argument("--fail-unless-blessed", action="store_true", help="exit with 3 when the model is not blessed")


def access_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how to get in."""
    group = parser.add_argument_group(
        "access",
        "What no flag says, the section kubeflow of CONFIG says, else the environment:\n"
        "TRIREME_KFP_HOST, TRIREME_KFP_NAMESPACE, TRIREME_KFP_TOKEN, TRIREME_KFP_COOKIES.",
    )
    group.add_argument("--host", metavar="URL", help="address of the server")
    group.add_argument("--namespace", metavar="NAME", help="namespace of the runs")
    group.add_argument("--token-file", metavar="FILE", help="file with the bearer token")
    group.add_argument(
        "--token-command",
        type=shlex.split,
        metavar="COMMAND",
        help="program, with its arguments, that prints the token; run without a shell",
    )
    group.add_argument("--cookies-file", metavar="FILE", help="file with the cookies that a proxy asks for")
    group.add_argument("--ca-file", metavar="FILE", help="certificates of the authorities to trust")
    group.add_argument("--client-certificate", metavar="FILE", help="client certificate in PEM")
    group.add_argument("--client-key", metavar="FILE", help="its private key")


def connect(arguments: argparse.Namespace, config: "Config") -> "Server":
    """The server that flags, configuration and environment name."""
    from pipelines.targets import access

    def find() -> access.Access:
        flags = {name: getattr(arguments, name) for name in _ACCESS}
        return access.find_access(config.kubeflow, flags, os.environ)

    return access.Server(find(), access.system_clock(), renew=find)


def _common(parser: argparse.ArgumentParser, experiment: bool = False) -> None:
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    if experiment:
        parser.add_argument("--experiment", metavar="NAME", help="group of runs (default: the pipeline's name)")
    access_flags(parser)


def _load(arguments: argparse.Namespace) -> "Config":
    from pipelines.config import load_config

    return load_config(arguments.config, arguments.overrides)


def _upload(arguments: argparse.Namespace) -> int:
    from pipelines.targets import kubeflow

    config = _load(arguments)
    server = connect(arguments, config)
    uploaded = kubeflow.upload(server, config)
    stored = kubeflow.copy_package(config, arguments.copy_to) if arguments.copy_to else None
    page = kubeflow.link(server, "pipelines", "details", uploaded.pipeline_id, "version", uploaded.version_id)
    if arguments.json:
        print(json.dumps({**uploaded._asdict(), "link": page, "copy": stored}))
        return EXIT_DONE
    print(f"{config.name}: version {uploaded.version} {'uploaded' if uploaded.made else 'is there already'}")
    if not uploaded.newest:
        print("note: another version was uploaded after it; schedules with version: latest run that one")
    print(page)
    if stored:
        print(stored)
    return EXIT_DONE


def _submit(arguments: argparse.Namespace) -> int:
    from pipelines.config import load_config, load_config_as_of
    from pipelines.targets import kubeflow

    config = load_config_as_of(arguments.config, arguments.overrides, arguments.as_of)
    base = load_config(arguments.config)
    server = connect(arguments, config)
    submission = kubeflow.Submission(config, base, arguments.root, arguments.experiment)
    try:
        run = kubeflow.submit(server, submission)
    except KeyboardInterrupt:
        _to_stderr(f"trireme: a run may have started already; this tells: {_words(arguments, 'runs', 'list')}")
        raise
    page = kubeflow.link(server, "runs", "details", run.run_id)
    show = _to_stderr if arguments.json else print
    show(f"{run.display_name} ({run.run_id}) started")
    show(page)
    if not arguments.wait:
        if arguments.json:
            print(json.dumps({"run_id": run.run_id, "name": run.display_name, "link": page}))
        return EXIT_DONE
    return _await_end(arguments, server, config, run)


def _await_end(arguments: argparse.Namespace, server: "Server", config: "Config", run: Any) -> int:
    """Shows a run until it ends, and ends as it did; who is stopped meanwhile is told that the run is not."""
    from pipelines.targets import kubeflow

    page = kubeflow.link(server, "runs", "details", run.run_id)
    try:
        finished = kubeflow.watch(server, run.run_id, _to_stderr if arguments.json else print)
    except (KeyboardInterrupt, TriremeError):
        _to_stderr(
            f"trireme: {run.display_name} ({run.run_id}) goes on on the server: {page}\n"
            f"trireme: to watch it again: {_words(arguments, 'runs', 'watch', run.run_id)}\n"
            f"trireme: to stop it:        {_words(arguments, 'runs', 'cancel', run.run_id)}"
        )
        raise
    ended = kubeflow.describe(finished, config, getattr(arguments, "root", None))
    if arguments.json:
        print(json.dumps(_plain(ended) | {"link": page}, ensure_ascii=False))
    else:
        _print(ended)
    if ended.exit_code == EXIT_DONE and arguments.fail_unless_blessed and ended.verdict != "blessed":
        return EXIT_NOT_BLESSED
    return ended.exit_code


def _words(arguments: argparse.Namespace, noun: str, verb: str, *names: str) -> str:
    """The command line that looks at the same server in the same way."""
    words = ["trireme", noun, verb, str(arguments.config), *names]
    for path in arguments.overrides:
        words += ["--set", path]
    for flag in ("experiment", *_ACCESS):
        if value := getattr(arguments, flag, None):
            words += [f"--{flag.replace('_', '-')}", shlex.join(value) if isinstance(value, list) else value]
    return shlex.join(words)


def _watch(arguments: argparse.Namespace) -> int:
    from pipelines.targets import kubeflow

    config = _load(arguments)
    server = connect(arguments, config)
    return _await_end(arguments, server, config, kubeflow.find_run(server, config, arguments.run, arguments.experiment))


def _list(arguments: argparse.Namespace) -> int:
    import itertools

    from pipelines.targets import kubeflow

    config = _load(arguments)
    server = connect(arguments, config)
    experiment_id = kubeflow.find_experiment(server, arguments.experiment or kubeflow.experiment_of(config))
    listed = itertools.islice(kubeflow.runs(server, experiment_id), arguments.count) if experiment_id else ()
    rows = kubeflow.describe_all(listed, config)
    if arguments.json:
        print(json.dumps([_plain(row) for row in rows], ensure_ascii=False))
        return EXIT_DONE
    for row in rows:
        metrics = " ".join(f"{name} {value:.4f}" for name, value in list(row.metrics.items())[:2] if value is not None)
        seconds = f"{row.seconds:,.0f} s" if row.seconds else "-"
        print(f"{row.name:<36} {row.state:<10} {seconds:>9}  {row.verdict or '-':<12} {metrics}".rstrip())
    unread = next((row.unread for row in rows if row.unread), None)
    if unread:
        _to_stderr(f"trireme: verdicts and metrics cannot be read: {unread}")
    if not rows:
        print(f"no runs in {arguments.experiment or kubeflow.experiment_of(config)}")
    return EXIT_DONE


def _show(arguments: argparse.Namespace) -> int:
    from pipelines.targets import kubeflow

    config = _load(arguments)
    server = connect(arguments, config)
    run = kubeflow.find_run(server, config, arguments.run, arguments.experiment)
    ended, tasks = kubeflow.describe(run, config), kubeflow.tasks_of(run)
    page = kubeflow.link(server, "runs", "details", run.run_id)
    if arguments.json:
        print(json.dumps(_plain(ended) | {"tasks": tasks, "link": page}, ensure_ascii=False))
        return EXIT_DONE
    print(f"{'run':<14}{ended.name} ({ended.run_id})")
    for task in tasks:
        seconds = f"{task['seconds']:,.0f} s" if task["seconds"] else ""
        print(f"{'':<14}{task['name']:<18}{task['state'].lower():<12}{seconds}".rstrip())
    _print(ended)
    print(page)
    return EXIT_DONE


def _cancel(arguments: argparse.Namespace) -> int:
    from pipelines.targets import kubeflow

    config = _load(arguments)
    server = connect(arguments, config)
    run = kubeflow.find_run(server, config, arguments.run, arguments.experiment)
    cancelled = kubeflow.cancel(server, run)
    if arguments.json:
        print(json.dumps({"run_id": run.run_id, "cancelled": cancelled, "state": run.state}))
    else:
        print(f"{run.display_name}: " + ("is being cancelled" if cancelled else f"had ended already: {run.state}"))
    return EXIT_DONE


def _retry(arguments: argparse.Namespace) -> int:
    from pipelines.targets import kubeflow

    config = _load(arguments)
    server = connect(arguments, config)
    run = kubeflow.find_run(server, config, arguments.run, arguments.experiment)
    kubeflow.retry(server, run)
    if arguments.json:
        print(json.dumps({"run_id": run.run_id, "retried": True}))
    else:
        print(f"{run.display_name}: its failed tasks are started again")
    return EXIT_DONE


def _print(ended: Any) -> None:
    print(f"{'state':<14}{ended.state.lower()}" + (f": {ended.error}" if ended.error else ""))
    if ended.verdict:
        print(f"{'verdict':<14}{ended.verdict}" + (f", promoted as version {ended.version}" if ended.version else ""))
    for reason in ended.reasons:
        print(f"{'':<14}{reason}")
    if ended.metrics:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in ended.metrics.items() if value is not None)
        print(f"{'test metrics':<14}{shown}")
    if ended.unread:
        _to_stderr(f"trireme: verdict and metrics cannot be read: {ended.unread}")


def _plain(ended: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(ended), "created_at": ended.created_at.isoformat() if ended.created_at else None}


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
