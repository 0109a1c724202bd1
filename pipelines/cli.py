"""`trireme`: the one command line. Loads neither TensorFlow nor kfp before a command needs them."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines import commands_check, commands_kubeflow, commands_schedule
from pipelines.commands_models import add_models_command
from pipelines.commands_predict import add_predict_command
from pipelines.flags import Parser, exit_codes
from pipelines.stopping import ended_by, sigterm_raises
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_BLESSED, BadInput, TriremeError
from trainer.own_code import look_beside

_EXAMPLES = """\
examples:
  trireme check configs/digits.yaml                     can it work?
  trireme run configs/digits.yaml --set train.epochs=3  here, with another setting
  trireme submit configs/digits.yaml --wait             on Kubeflow
  trireme COMMAND --help                                its options and exit codes"""


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        words: The command line after the program's name. None: that of the process.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(words)
    try:
        with sigterm_raises():
            return _call(arguments)
    except TriremeError as error:
        print("\n".join(f"trireme: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        said, code = ended_by(interrupt)
        print(f"trireme: {said}", file=sys.stderr)
        return code
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _call(arguments: argparse.Namespace) -> int:
    for name, value in vars(arguments).items():
        empty = not value.strip() if isinstance(value, str) else value == []
        if empty and name != "overrides":  # a variable of a script that is not set
            raise BadInput(f"--{name.replace('_', '-')}: is empty; give it a value, or leave it out if it is optional")
    if "config" in arguments:
        look_beside(arguments.config)
    return arguments.command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trireme",
        description="Prepare, train, evaluate and promote a TensorFlow model: one YAML file, here or on Kubeflow.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = _command(
        commands,
        "run",
        _run,
        "run the compiled pipeline on this machine",
        exit_codes("a task failed", blessed=True) + " (a checkpoint was saved;\n            run again to go on)",
    )
    run.add_argument("--root", default="output", metavar="DIR",
                     help="folder or gs:// prefix for runs, prepared data and the registry (default: %(default)s)")  # fmt: skip
    run.add_argument(
        "--as-of",
        metavar="MOMENT",
        help="take the data window as it was then, such as 2027-01-29T03:00Z (default: now)",
    )
    run.add_argument("--runner", choices=("subprocess", "docker"), default="subprocess",
                     help="how each task is run (default: %(default)s)")  # fmt: skip
    run.add_argument(
        "--json", action="store_true", help="end standard output with the run's document as a line of JSON"
    )
    run.add_argument("--fail-unless-blessed", action="store_true", help="exit with 3 when the model is not blessed")

    commands_check.register(commands, _command)

    compile_ = _command(commands, "compile", _compile, "write the pipeline as Kubeflow's YAML")
    compile_.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="where the YAML goes")

    commands_kubeflow.register(commands, _command)
    commands_schedule.register(commands, _command)

    schema = commands.add_parser("schema", help="print the JSON Schema of a configuration file",
                                 description="Print the JSON Schema of a configuration file, for editors.",
                                 epilog=exit_codes())  # fmt: skip
    schema.set_defaults(command=_schema)
    add_models_command(commands)
    add_predict_command(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction, name: str, function: object, summary: str, exits: str = ""
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=exits or exit_codes(),
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="configuration file, such as configs/digits.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE",
                        help="override a setting, such as train.epochs=3; may be repeated")  # fmt: skip
    parser.set_defaults(command=function)
    return parser


class _Version(argparse.Action):
    """Prints the version; looked up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"trireme {version('trireme')}")
        parser.exit()


def _run(arguments: argparse.Namespace) -> int:
    from pipelines.config import load_config_as_of
    from pipelines.targets.local import run
    from pipelines.targets.output import Display, TerminalDisplay

    config = load_config_as_of(arguments.config, arguments.overrides, arguments.as_of)
    display = TerminalDisplay(sys.stderr) if sys.stderr.isatty() else Display(sys.stderr)
    outcome = run(config, arguments.root, arguments.runner, display)
    document = outcome.document
    if document["state"] == "succeeded":
        _print_outcome(document)
    if outcome.message:
        print("\n".join(f"trireme: {line}" for line in outcome.message.splitlines()), file=sys.stderr)
    if arguments.json:
        print(json.dumps(document, ensure_ascii=False), flush=True)
    if outcome.exit_code == EXIT_DONE and arguments.fail_unless_blessed and document["verdict"] != "blessed":
        return EXIT_NOT_BLESSED
    return outcome.exit_code


def _print_outcome(document: dict) -> None:
    print()
    print(f"{'verdict':<14}{document['verdict']}")
    for reason in document["reasons"]:
        print(f"{'':<14}{reason}")
    metrics = ((key, value) for key, value in document["metrics"].get("test", {}).items() if value is not None)
    print(f"{'test metrics':<14}" + ", ".join(f"{key} {value:.4f}" for key, value in metrics))
    print(f"{'seconds':<14}" + ", ".join(f"{task} {seconds:.1f}" for task, seconds in document["seconds"].items()))
    print(f"{'report':<14}{document['artifacts']['report'] or 'none'}")
    print(f"{'model':<14}{document['artifacts']['pushed_model'] or 'not promoted'}")
    print(f"{'run':<14}{document['run_dir']}", flush=True)


def _compile(arguments: argparse.Namespace) -> int:
    from pipelines.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    from pipelines.training import compile_pipeline

    compile_pipeline(config, arguments.output)
    print(f"{arguments.output}: pipeline {config.name}")
    return EXIT_DONE


def _schema(_: argparse.Namespace) -> int:
    from pipelines.config import json_schema

    print(json_schema(), end="")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
