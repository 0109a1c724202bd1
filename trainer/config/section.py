"""What every section of the configuration shares: strictness, and one list of everything that is wrong.

train = parse(TrainConfig, {"epochs": 3}, path="train")      # BadInput lists everything that is wrong, at once
train == parse_json(TrainConfig, train.to_json(), path="train")
"""

import difflib
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from trainer.errors import BadInput

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


def text(pattern: str, rule: str) -> Any:
    """A type for text of one form; whoever gives another form reads the rule, not the pattern."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise PydanticCustomError("form", "must be {rule}", {"rule": rule})
        return value

    return Annotated[str, AfterValidator(check), Field(json_schema_extra={"pattern": f"^(?:{pattern})$"})]


Place = text(r"gs://[^/].*|(?![A-Za-z][A-Za-z0-9+.-]*:/).+", "a folder, or gs:// with a bucket's name after it")
"""A folder or a prefix of a bucket, as trainer.storage takes them."""

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A function of one's own: `package.module:function`."""

OVERRIDDEN = -1  # in place of a line number: the value came from the command line


class Problem(NamedTuple):
    """One thing that is wrong: where, what stands there, and the rule it breaks."""

    path: str
    value: Any
    rule: str

    def __str__(self) -> str:
        return f"{self.path} = {_shown(self.value)}: {self.rule}"


class Section(BaseModel):
    """A closed, frozen group of settings; strict about types, so that `yes`, `"3"` and NaN are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    refused: ClassVar[dict[str, str]] = {}
    """Settings that a person may look for and that cannot be: name → what to do in their place."""

    def problems(self) -> Iterator[Problem]:
        """Combinations inside this section that cannot work; paths are relative to the section."""
        return iter(())

    def to_json(self) -> str:
        """The section as one compact JSON string with sorted keys: equal sections give equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


S = TypeVar("S", bound=Section)


def parse(model: type[S], data: Any, *, path: str = "", lines: dict[str, int] | None = None, source: str = "") -> S:
    """Validates data against a section, reporting everything that is wrong at once.

    Args:
        model: The section's class.
        data: What was read from YAML or JSON: mappings, lists and scalars.
        path: Dotted path of the section, put before each problem's own.
        lines: Line number (from 1) by full dotted path, where known, or `OVERRIDDEN`; shown before the problem.
        source: File name shown before the line number.

    Raises:
        BadInput: With one line per problem: dotted path, value, rule.
    """
    problems, section = _validated(model, data)
    if section is not None and not problems:
        return section

    def shown(problem: Problem) -> str:
        full = ".".join(part for part in (path, problem.path) if part)
        where = _line(full, lines or {})
        prefix = (
            "--set: " if where == OVERRIDDEN else f"{source}:{where}: " if where else f"{source}: " if source else ""
        )
        return prefix + str(problem._replace(path=full or "(the whole file)"))

    raise BadInput("\n".join(dict.fromkeys(shown(problem) for problem in problems)))


def parse_json(model: type[S], text: str, *, path: str = "") -> S:
    """A section from its JSON string, as `Section.to_json` gives it. Raises BadInput."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"{path or 'configuration'} = {_shown(text)}: is not JSON ({error})") from None
    return parse(model, data, path=path)


def _validated(model: type[S], data: Any) -> tuple[list[Problem], S | None]:
    """All problems of the data. Values that are wrong by themselves are left out and the rest is looked at again,
    so that impossible combinations are reported in the same breath."""
    if not isinstance(data, dict):
        return [Problem("", data, "must be a mapping of settings")], None
    wrong: list[Problem] = []
    remaining = data
    for _ in range(3):
        try:
            section = model.model_validate_json(json.dumps(remaining))
        except ValidationError as error:
            found = error.errors(include_url=False)
            named = {problem.path for problem in wrong}  # what was left out for being wrong is not missing as well
            wrong += [problem for entry in found if (problem := _problem(model, entry)).path not in named]
            remaining = _without(remaining, [_location(remaining, entry["loc"]) for entry in found])
            for name, info in model.model_fields.items():
                if info.is_required() and name not in remaining and info.examples:
                    remaining[name] = info.examples[0]
            continue
        skipped = {problem.path for problem in wrong}
        crossings = [problem for problem in section.problems() if not (skipped & _mentioned(problem))]
        # A rule that speaks of a setting which was left out for being wrong saw its default, not what was given.
        crossings = [problem for problem in crossings if not any(_names(problem.rule, path) for path in skipped)]
        return wrong + crossings, section
    return wrong, None


def _names(rule: str, path: str) -> bool:
    """Whether a rule's words hold a dotted path, such as `cluster.queue`."""
    return "." in path and re.search(rf"(?<![\w.]){re.escape(path)}(?![\w])", rule) is not None


def _mentioned(problem: Problem) -> set[str]:
    parts = problem.path.split(".")
    return {".".join(parts[: n + 1]) for n in range(len(parts))}


def _location(data: Any, loc: Sequence[int | str]) -> tuple[int | str, ...]:
    """The part of a pydantic location that names a place in the data (it also names union members)."""
    place: list[int | str] = []
    for part in loc:
        if (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            data = data[part]
        else:
            continue
        place.append(part)
    return tuple(place)


def _without(data: Any, places: list[tuple[int | str, ...]]) -> Any:
    copy = json.loads(json.dumps(data))
    for place in places:
        node, last = copy, None
        for part in place[:-1]:
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list):
                last = True  # leave a list as a whole: removing one element would change the others' meaning
                break
        if last is None and place and isinstance(node, dict):
            node.pop(place[-1], None)
    return copy


def _problem(model: type[Section], entry: dict[str, Any]) -> Problem:
    loc = [part for part in entry["loc"] if not (isinstance(part, str) and ("[" in part or part == "function-after"))]
    path = ".".join(str(part) for part in loc)
    kind, context = entry["type"], entry.get("ctx", {})
    value = entry["input"]
    if kind == "extra_forbidden":
        section, key = _section_at(model, loc[:-1]), str(loc[-1])
        known = list(section.model_fields) if section else []
        return Problem(path, value, getattr(section, "refused", {}).get(key) or "unknown key" + suggestion(key, known))
    if kind == "missing":
        return Problem(path, None, "must be given")
    rules = {
        "greater_than": "must be greater than {gt}",
        "greater_than_equal": "must be at least {ge}",
        "less_than": "must be less than {lt}",
        "less_than_equal": "must be at most {le}",
        "literal_error": "must be one of {expected}",
        "finite_number": "must be a finite number",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "string_pattern_mismatch": "must match {pattern}",
        "dict_type": "must be a mapping",
        "model_type": "must be a mapping of settings",
        "list_type": "must be a list",
        "tuple_type": "must be a list",
    }
    if kind in rules:
        return Problem(path, value, rules[kind].format(**context))
    return Problem(path, value, entry["msg"][0].lower() + entry["msg"][1:])


def _section_at(model: Any, loc: Sequence[int | str]) -> type[Section] | None:
    """The section at a location, through mappings and lists of sections."""
    kind = model
    for part in loc:
        section = _section_in(kind)
        if section is not None and part in section.model_fields:
            kind = section.model_fields[part].annotation
    return _section_in(kind)


def _section_in(kind: Any) -> type[Section] | None:
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    return next((found for inner in get_args(kind) if (found := _section_in(inner))), None)


def suggestion(word: str, known: Sequence[str]) -> str:
    """`; did you mean …?` where a known word is near, else nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def _line(path: str, lines: dict[str, int]) -> int | None:
    while path:
        if path in lines:
            return lines[path]
        path = path.rpartition(".")[0]
    return None


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
