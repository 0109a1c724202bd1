"""`trireme models list | show | promote | rollback | verify`: the registry by hand; thin over `trainer.registry`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pipelines.flags import count, exit_codes
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInput, TriremeError

_SHOWN_METRICS = 3


def add_models_command(commands: argparse._SubParsersAction) -> None:
    """Puts the command and its actions into the command line."""
    models = commands.add_parser("models", help="look at the model registry, promote and roll back",
                                 description="Look at the model registry, promote and roll back.")  # fmt: skip
    actions = models.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, function: Any, summary: str, failed: str = "failed") -> argparse.ArgumentParser:
        added = actions.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=exit_codes(failed),
        )
        added.add_argument("--registry", default="output/models", metavar="URI",
                           help="folder or gs:// prefix of the registry (default: %(default)s)")  # fmt: skip
        added.set_defaults(command=function)
        return added

    def json_flag(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    listed = action("list", _list, "list the models, or the versions of one", "a version is broken")
    listed.add_argument("name", nargs="?", metavar="NAME", help="the model; without it all models are listed")
    json_flag(listed)
    shown = action("show", _show, "show what is on record of a version", "the version is broken")
    shown.add_argument("name", metavar="NAME", help="the model")
    shown.add_argument(
        "version", nargs="?", type=count, metavar="VERSION", help="number of the version (default: the champion)"
    )
    json_flag(shown)
    promoted = action(
        "promote",
        _promote,
        "make a version the champion, whatever its verdict; this is put on record",
        "a file of it differs",
    )
    promoted.add_argument("name", metavar="NAME", help="the model")
    promoted.add_argument("version", type=count, metavar="VERSION", help="number, as `models list NAME` has it")
    promoted.add_argument("--reason", required=True, metavar="TEXT", help="why; goes on record")
    rolled = action(
        "rollback",
        _rollback,
        "make the champion before this one champion again; this is put on record",
        "a file of it differs",
    )
    rolled.add_argument("name", metavar="NAME", help="the model")
    rolled.add_argument("--reason", required=True, metavar="TEXT", help="why; goes on record")
    verified = action(
        "verify", _verify, "read every file again and compare it with its recorded digest", "a file differs"
    )
    verified.add_argument("name", metavar="NAME", help="the model")
    verified.add_argument(
        "version", nargs="?", type=count, metavar="VERSION", help="number of the version (default: all)"
    )


def _registry(arguments: argparse.Namespace) -> Any:
    """The model's registry; a name that is not there is a mistake, for reading would otherwise find it empty."""
    from trainer import storage
    from trainer.config.section import suggestion
    from trainer.registry import Registry

    _check_place(arguments.registry)
    if arguments.name not in (names := storage.list_folders(arguments.registry)):
        known = ", ".join(sorted(names)) or "none"
        hint = suggestion(arguments.name, names)
        raise BadInput(f"{arguments.registry}: has no model {arguments.name} (there are: {known}){hint}")
    return Registry(arguments.registry, arguments.name)


def _check_place(registry: str) -> None:
    """A registry on this machine that is not there is a mistake too, and so is a file."""
    from trainer import storage

    if not storage.is_remote(registry) and not Path(registry).is_dir():
        raise BadInput(
            f"--registry = {registry}: {'is a file' if Path(registry).exists() else 'there is no such folder'}"
        )


def _list(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        return _list_models(arguments)
    from trainer.registry import Broken

    models = _registry(arguments)
    champion = models.champion_number()
    rows = []
    for found in models.survey():
        record = {} if isinstance(found, Broken) else found.record
        rows.append(
            {
                "version": found.number,
                "champion": found.number == champion,
                "verdict": (record.get("verdict") or {}).get("verdict"),
                "metrics": record.get("metrics") or {},
                "digest": record.get("digest"),
                "uri": found.uri,
                "broken": found.reason if isinstance(found, Broken) else None,
            }
        )
    lost = champion is not None and not any(row["champion"] for row in rows)
    code = EXIT_FAILED if lost or any(row["broken"] for row in rows) else EXIT_DONE
    if lost:
        print(f"trireme: the champion, version {champion}, is not there", file=sys.stderr)
    if arguments.json:
        print(json.dumps(rows, ensure_ascii=False))
        return code
    for row in rows:
        metrics = [(name, value) for name, value in row["metrics"].items() if value is not None][:_SHOWN_METRICS]
        told = row["broken"] or ", ".join(f"{name} {value:.4f}" for name, value in metrics)
        verdict = "BROKEN" if row["broken"] else row["verdict"] or "–"
        print(f"{'*' if row['champion'] else ' '} {row['version']:>4}  {verdict:<14}{told}")
    return code


def _list_models(arguments: argparse.Namespace) -> int:
    """One line a model; what is wrong with one hides no other."""
    from trainer import storage
    from trainer.registry import Registry

    _check_place(arguments.registry)
    rows: list[dict[str, Any]] = []
    for name in sorted(storage.list_folders(arguments.registry)):
        row = {"name": name, "champion": None, "broken": None}
        try:
            models = Registry(arguments.registry, name)
            row["champion"] = models.champion_number()
            models.champion()
        except TriremeError as error:
            row["broken"] = str(error)
        rows.append(row)
    if arguments.json:
        print(json.dumps(rows, ensure_ascii=False))
    for row in () if arguments.json else rows:
        told = f"  BROKEN: {row['broken']}" if row["broken"] else ""
        print(f"{row['name']:<24}champion {row['champion'] or '–'}{told}")
    if not rows and not arguments.json:
        print(f"{arguments.registry} holds no models")
    return EXIT_FAILED if any(row["broken"] for row in rows) else EXIT_DONE


def _show(arguments: argparse.Namespace) -> int:
    models = _registry(arguments)
    version = models.version(arguments.version) if arguments.version is not None else models.champion()
    if version is None:
        raise BadInput(f"{models.uri}: has no champion yet; name a version")
    history = [event for event in models.history() if version.number in (event["version"], event["previous"])]
    if arguments.json:
        told = {"version": version.number, "uri": version.uri, "record": version.record, "history": history}
        print(json.dumps(told, ensure_ascii=False))
        return EXIT_DONE
    record = version.record
    print(f"{arguments.name} version {version.number}: {version.uri}")
    for title, key in (("digest", "digest"), ("model", "model_digest"), ("data", "data_digest"), ("run", "run")):
        if record.get(key):
            print(f"{title:<10}{record[key]}")
    for reason in (record.get("verdict") or {}).get("reasons", []):
        print(f"{'verdict':<10}{reason}")
    intervals = record.get("intervals", {})
    for name, value in record.get("metrics", {}).items():
        if value is not None:
            between = intervals.get(name)
            print(f"{'metric':<10}{name} {value:.4f}" + (f" ({between[0]:.4f} to {between[1]:.4f})" if between else ""))
    for event in history:
        print(
            f"{event['action']:<10}{event['time']} {event['previous'] or '–'} → {event['version']}: {event['reason']}"
        )
    return EXIT_DONE


def _promote(arguments: argparse.Namespace) -> int:
    models = _registry(arguments)
    version = models.promote(arguments.version, models.champion_number(), arguments.reason, verified=True)
    print(f"{arguments.name}: version {version.number} is champion: {version.uri}")
    return EXIT_DONE


def _rollback(arguments: argparse.Namespace) -> int:
    version = _registry(arguments).rollback(arguments.reason)
    print(f"{arguments.name}: version {version.number} is champion again: {version.uri}")
    return EXIT_DONE


def _verify(arguments: argparse.Namespace) -> int:
    findings = _registry(arguments).verify(arguments.version)
    for finding in findings:
        print(finding)
    which = "every version" if arguments.version is None else f"version {arguments.version}"
    if not findings:
        print(f"{arguments.name}: {which} is as it was published")
    return EXIT_FAILED if findings else EXIT_DONE
