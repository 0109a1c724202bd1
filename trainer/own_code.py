"""A person's own function by its import path.

measure = own_function("metrics:cost", setting="evaluate.own_metrics.cost.function")
"""

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import BadInput, reason_of

_OURS = Path(__file__).parent


def own_function(path: str, *, setting: str) -> Callable:
    """The function that `package.module:function` names; modules beside the working directory are found too.

    Args:
        path: Its import path.
        setting: The setting that names it, for messages.

    Raises:
        BadInput: It cannot be imported.
    """
    module_name, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:  # a person's module stands where they work
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{setting} = {json.dumps(path)}: cannot be imported: {error} (the working directory and PYTHONPATH count)"
        ) from None
    except Exception as error:
        raise BadInput(f"{setting} = {json.dumps(path)}: cannot be imported: {fault_of(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise BadInput(f"{setting} = {json.dumps(path)}: {module_name} has no function {name}")
    return function


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
