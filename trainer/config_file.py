"""A YAML file → plain data with line numbers, read the way people expect.

    data, lines = read_config_file(Path("configs/digits.yaml"))
    data = override(data, ["train.epochs=3"], lines)

Scalars follow YAML 1.2: `1e-3` is a number and `no` is text (PyYAML alone reads 1.1, where it is the other way round).
A key that stands twice is an error, since one of the two would be ignored.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.config import OVERRIDDEN
from trainer.errors import BadInput


class _Loader(yaml.SafeLoader):
    """Safe, with the scalars of YAML 1.2's core schema."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
    ("merge", r"<<", "<"),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^$"), [""])


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_PLAIN = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ["null", "bool", "int", "float", "str", "map", "seq", "merge"]
)
_MOST_VALUES = 100_000  # of a file, with what its aliases repeat
_LONGEST_NUMBER = 400
_KINDS = {list: "a list", str: "text", int: "a number", float: "a number", bool: "true or false", type(None): "empty"}


def read_config_file(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The content of a configuration file and the line number (from 1) of each dotted path.

    Raises:
        BadInput: The file is missing, is not YAML or UTF-8, names a key twice or is not a mapping.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: is not UTF-8 text (byte {error.start})") from None
    lines: dict[str, int] = {}
    try:
        data = _read(text, lines, str(file))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        if reason.startswith("but "):
            reason = f"{error.context}, {reason}"
        raise BadInput(f"{file}{where}: is not valid YAML: {reason}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{file}: must be a mapping of settings, and is {_KINDS[type(data)]}")
    return data, lines


def override(data: dict[str, Any], settings: Sequence[str], lines: dict[str, int]) -> dict[str, Any]:
    """A copy of the data with `path=value` settings put in; values are read as YAML. `lines` learns what they changed.

    Raises:
        BadInput: A setting has no `=`, no name, or leads through something that is not a mapping.
    """
    copy = json.loads(json.dumps(data))
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise BadInput(f"--set {setting}: must be path=value, such as train.epochs=3")
        try:
            value = _read(text, {}, f"--set {keys[-1]}")
        except yaml.YAMLError:
            raise BadInput(f"--set {setting}: {text!r} is not a YAML value") from None
        node = copy
        for depth, key in enumerate(keys[:-1]):
            if node.get(key) is None:
                node[key] = {}
            node = node[key]
            if not isinstance(node, dict):
                raise BadInput(f"--set {setting}: {'.'.join(keys[: depth + 1])} is not a mapping")
        node[keys[-1]] = value
        lines[".".join(keys)] = OVERRIDDEN
        for depth in range(1, len(keys)):
            lines.setdefault(".".join(keys[:depth]), OVERRIDDEN)
    return copy


def _read(text: str, lines: dict[str, int], file: str) -> Any:
    """The value of a YAML text; `lines` learns where its parts stand. Raises BadInput and yaml's own errors."""
    try:
        _note_lines(yaml.compose(text, Loader=_Loader), "", lines, file)
        return _Loader(text).get_single_data()
    except RecursionError:
        raise BadInput(f"{file}: is nested too deeply") from None


def _note_lines(node: Any, path: str, lines: dict[str, int], file: str) -> None:
    if node is None:
        return
    where = file if file.startswith("--set") else f"{file}:{node.start_mark.line + 1}"
    if node.tag not in _PLAIN:
        raise BadInput(
            f"{where}: {node.tag.replace('tag:yaml.org,2002:', '!!')} is no kind of value here; leave it out"
        )
    if len(lines) > _MOST_VALUES:
        raise BadInput(f"{where}: holds more than {_MOST_VALUES:,} values, counting what aliases repeat")
    if isinstance(node, yaml.ScalarNode):
        if node.tag.endswith(":int") and len(node.value) > _LONGEST_NUMBER:
            raise BadInput(
                f"{where}: {path or 'the value'} is a number of {len(node.value):,} digits, which is no setting's"
            )
        try:
            node.value.encode()
        except UnicodeEncodeError:
            raise BadInput(f"{where}: {path or 'the value'} is not valid Unicode") from None
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith((":int", ":float", ":bool", ":null")):
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a collection"
                raise BadInput(f"{file}:{line}: {shown} = key: keys must be text; put it in quotes")
            name = f"{path}.{key.value}" if path else key.value
            if key.value in seen:
                raise BadInput(f"{file}:{line}: {name} stands twice; remove one")
            seen.add(key.value)
            lines[name] = line
            _note_lines(value, name, lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[f"{path}.{index}"] = value.start_mark.line + 1
            _note_lines(value, f"{path}.{index}", lines, file)
