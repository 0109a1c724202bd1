"""A person's own function by its import path.

look_beside(Path("configs/digits.yaml"))      # modules in configs/ are found, here and in the processes started from here
measure = own_function("metrics:cost", setting="evaluate.own_metrics.cost.function")
check_call(measure, labels, answers, setting="evaluate.own_metrics.cost.function", takes="labels and answers")
"""

import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import BadInput, reason_of

_OURS = Path(__file__).parent
_FOLDERS = "TRIREME_CODE_FOLDERS"
"""Environment variable: the folders of configuration files, the newest first. Unlike PYTHONPATH it hides no module of a
library from a process that imports nothing of a person's own."""


def look_beside(file: Path) -> None:
    """Has modules in a configuration file's folder found by this process and by those that it starts."""
    folders = [str(file.parent.resolve()), *os.environ.get(_FOLDERS, "").split(os.pathsep)]
    os.environ[_FOLDERS] = os.pathsep.join(dict.fromkeys(filter(None, folders)))


def own_function(path: str, *, setting: str) -> Callable:
    """The function, or class, that `package.module:function` names.

    The working directory is searched first, then the configuration file's folder (`look_beside`), then PYTHONPATH and
    what is installed.

    Args:
        path: Its import path.
        setting: The setting that names it, for messages.

    Raises:
        BadInput: It cannot be imported.
    """
    module_name, _, name = path.partition(":")
    folders = [str(Path.cwd()), *filter(None, os.environ.get(_FOLDERS, "").split(os.pathsep))]
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{setting} = {json.dumps(path)}: cannot be imported: {error} (looked in {', '.join(dict.fromkeys(folders))},"
            " on PYTHONPATH and among what is installed)"
        ) from None
    except SystemExit as error:  # a script without `if __name__ == "__main__":`
        raise BadInput(
            f"{setting} = {json.dumps(path)}: cannot be imported: {module_name} exits (with {error.code}) when it is"
        ) from None
    except Exception as error:
        raise BadInput(f"{setting} = {json.dumps(path)}: cannot be imported: {fault_of(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise BadInput(f"{setting} = {json.dumps(path)}: {module_name} has no function {name}")
    return function


def check_call(function: Callable, *arguments: Any, setting: str, takes: str, **named: Any) -> None:
    """Holds a call against the function's parameters, without making it.

    Args:
        function: From `own_function`.
        arguments: What it will be called with by place; only how many there are counts.
        setting: The setting that names it, for messages.
        takes: What it is called with, in words.
        named: What it will be called with by name.

    Raises:
        BadInput: The call would fail.
    """
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, as some of numpy's are
        return
    try:
        parameters.bind(*arguments, **named)
    except TypeError as error:
        raise BadInput(f"{setting}: is called with {takes}, and has the parameters {parameters}: {error}") from None


def fault_of(error: Exception) -> str:
    """What a person's own code raised and the line of theirs that led to it, such as `KeyError: 'a' (models.py, line 9)`.

    The line is left out where none of theirs was reached.
    """
    reason = reason_of(error)
    kind = type(error).__name__
    text = reason if isinstance(error, TypeError | ValueError) or reason == kind else f"{kind}: {reason}"
    if isinstance(error, SyntaxError):  # its text has the line already
        return text
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and "site-packages" not in frame.filename
        and not Path(frame.filename).is_relative_to(_OURS)
        and not Path(frame.filename).is_relative_to(sys.base_prefix)
    ]
    return f"{text} ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else text


def ask_own(function: Callable, *arguments: Any, setting: str) -> Any:
    """What a person's own function answers.

    Args:
        function: From `own_function`.
        arguments: What it takes.
        setting: The setting that names it, for messages.

    Raises:
        BadInput: It raised; the message has the line where.
    """
    try:
        return function(*arguments)
    except Exception as error:  # whatever it is, it is theirs to mend
        frames = traceback.extract_tb(error.__traceback__)[1:]
        where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        raise BadInput(f"{setting}: raised {type(error).__name__}{where}: {error}") from error
