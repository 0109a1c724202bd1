"""What Kubeflow's cache compares, task by task, and what of it changed since a run.

    keys = cache_keys(spec, arguments)          # {"prepare-data": Key(cached=True, parts={"image": …, "data": …})}
    changes(keys["train-model"], before)        # ["train: epochs 3 → 5"]
    following(key, {"prepare-data"})            # ["examples: made anew by prepare-data"]

The server's key is the image's name, the command, the parameters and the identities of the input artifacts. It knows neither
the content of an image nor that of an address, which is why `code` and `source` are parameters of our tasks.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """What one task's key is made of."""

    cached: bool
    """Whether the task may be taken from the cache at all."""
    parts: dict[str, Any]
    """`image`, `command` (its digest), each parameter, and each artifact as `task.output`."""


def cache_keys(spec: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Key]:
    """The keys of a compiled pipeline, in the order of the tasks.

    Args:
        spec: Its specification, the first document of the compiled YAML.
        arguments: Values of the run's parameters; the others have their defaults.
    """
    parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    bound = {name: arguments.get(name, definition.get("defaultValue")) for name, definition in parameters.items()}
    keys = dict(_walk(spec, spec["root"], bound))
    last = {name for name, task in spec["root"]["dag"]["tasks"].items() if "strategy" in task.get("triggerPolicy", {})}
    return dict(sorted(keys.items(), key=lambda item: (item[0] in last, _depth(item[0], keys), item[0])))


def _depth(task: str, keys: Mapping[str, Key]) -> int:
    """How many tasks come before it, one after the other."""
    producers = set(_producers(keys[task]).values())
    return max((1 + _depth(producer, keys) for producer in producers & keys.keys()), default=0)


def _producers(key: Key) -> dict[str, str]:
    """The task that each part comes from, by the part."""
    values = {part: str(value) for part, value in key.parts.items()}
    return {
        part: value.removeprefix("from ").rpartition(".")[0]
        for part, value in values.items()
        if value.startswith("from ")
    }


def following(key: Key, again: Collection[str]) -> list[str]:
    """What of a task's key is made anew by the tasks that run again before it."""
    return [f"{part}: made anew by {task}" for part, task in _producers(key).items() if task in again]


def data_change(subject: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A sentence on what became of the files since a run, from what `fingerprint-data` noted then and would note now."""
    if then["digest"] == now["digest"] and then["until"] == now["until"]:
        return None
    if then["until"] != now["until"]:
        return f"data changed: {subject}: the window ends on {now['until']}, and ended on {then['until']}"
    before, files = then["num_files"], now["num_files"]
    what = f"{files:,} files, and then {before:,}" if files != before else f"of {files:,} files at least one is another"
    return f"data changed: {subject}: {what}"


def _walk(spec: Mapping[str, Any], component: Mapping[str, Any], bound: Mapping[str, Any]) -> Iterator[tuple[str, Key]]:
    executors = spec["deploymentSpec"]["executors"]
    for name, task in component["dag"]["tasks"].items():
        inner = spec["components"][task["componentRef"]["name"]]
        given = {key: _value(source, bound) for key, source in task.get("inputs", {}).get("parameters", {}).items()}
        given |= {key: _value(source, bound) for key, source in task.get("inputs", {}).get("artifacts", {}).items()}
        if "dag" in inner:
            yield from _walk(spec, inner, given)
            continue
        container = executors[inner["executorLabel"]]["container"]
        command = json.dumps([container.get("command"), container.get("args")]).encode()
        parts = {"image": container["image"], "command": f"sha256:{hashlib.sha256(command).hexdigest()[:16]}", **given}
        yield name, Key(bool(task.get("cachingOptions", {}).get("enableCache")), parts)


def _value(source: Mapping[str, Any], bound: Mapping[str, Any]) -> Any:
    if "runtimeValue" in source:
        return source["runtimeValue"].get("constant")
    for kind in ("componentInputParameter", "componentInputArtifact"):
        if kind in source:
            return bound.get(source[kind])
    for kind, key in (("taskOutputParameter", "outputParameterKey"), ("taskOutputArtifact", "outputArtifactKey")):
        if kind in source:
            return f"from {source[kind]['producerTask']}.{source[kind][key]}"
    return None


def changes(now: Key, before: Key | None) -> list[str]:
    """What differs, a sentence a part; sections that are JSON are compared setting by setting."""
    if before is None:
        return ["the task is new"]
    found = []
    for name in sorted(now.parts.keys() | before.parts.keys()):
        old, new = before.parts.get(name), now.parts.get(name)
        if old != new:
            old_section, new_section = _section(old), _section(new)
            if old_section is not None and new_section is not None:
                for path in sorted(old_section.keys() | new_section.keys()):
                    if old_section.get(path) != new_section.get(path):
                        found.append(
                            f"{name}.{path}: {_shown(old_section.get(path))} → {_shown(new_section.get(path))}"
                        )
            else:
                found.append(f"{name}: {_shown(old)} → {_shown(new)}")
    return found


def _section(value: Any) -> dict[str, Any] | None:
    """A section's settings by dotted path, where the value is one."""
    try:
        content = json.loads(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return dict(_flat(content, "")) if isinstance(content, dict) else None


def _flat(content: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = re.sub(r"(sha256:[0-9a-f]{12})[0-9a-f]{52}", r"\1", text)
    return text if len(text) <= 60 else f"{text[:57]}..."
