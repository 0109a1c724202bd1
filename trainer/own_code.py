"""A person's own function by its import path.

measure = own_function("metrics:cost", setting="evaluate.own_metrics.cost.function")
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from trainer.errors import BadInput


def own_function(path: str, *, setting: str) -> Callable:
    """The function that `package.module:function` names; modules beside the working directory are found too.

    Args:
        path: Its import path.
        setting: The setting that names it, for messages.

    Raises:
        BadInput: It cannot be imported.
    """
    module_name, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:  # a person's module stands beside their configuration
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadInput(f"{setting} = {json.dumps(path)}: cannot be imported: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise BadInput(f"{setting} = {json.dumps(path)}: {module_name} has no function {name}")
    return function
