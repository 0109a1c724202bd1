"""Rows of a table file, one by one, each with its place and either its values or what is wrong with it.

    columns = column_names(path, "csv")
    for row in read_rows(path, "csv", columns): row.number, row.values, row.fault

What cannot be told apart any more (a quote that is never closed, two columns of one name) is refused; everything else is a
bad row, and the next one is read.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import BadInput

_LONGEST_FIELD = 16 * 1024**2
_NAMED_ROWS = 10_000  # rows of a JSON-lines file that name its columns
_DELIMITERS = {"csv": ",", "tsv": "\t"}


class Row(NamedTuple):
    """One row of a table."""

    number: int
    """Line it begins in (text files) or row, from 1. 0: the file as a whole."""
    values: Sequence[Any] | None
    """In the order of the columns; None where the row is bad."""
    fault: str | None
    """What is wrong with it."""


def column_names(path: Path, form: str) -> list[str] | None:
    """Names of a file's columns; None where it is empty.

    Raises:
        BadInput: The header cannot be used.
    """
    if form == "parquet":
        return _checked(path, list(_parquet(path).schema_arrow.names))
    if form == "jsonl":
        names: dict[str, None] = {}
        for index, (_, record) in enumerate(_json_records(path)):
            if isinstance(record, dict):
                names.update(dict.fromkeys(record))
            if index == _NAMED_ROWS:
                break
        return _checked(path, list(names)) if names else None
    header = next(_csv_rows(path, _DELIMITERS[form]), None)
    if header is None or (header.fault is None and not any(header.values)):
        return None
    if header.fault:
        raise BadInput(f"{path}, row {header.number}: {header.fault}, and it is the header")
    return _checked(path, header.values)


def read_rows(path: Path, form: str, columns: Sequence[str], group: int | None = None) -> Iterator[Row]:
    """The rows of a file.

    Args:
        path: The file.
        form: `csv`, `tsv`, `jsonl` or `parquet`.
        columns: Names of the columns wanted, in this order.
        group: Row group of a Parquet file. None: all.

    Raises:
        BadInput: A column is missing, or a quote is never closed.
    """
    if form == "parquet":
        return _parquet_rows(path, columns, group)
    if form == "jsonl":
        return _json_rows(path, columns)
    return _delimited_rows(path, form, columns)


def num_groups(path: Path) -> list[int]:
    """Rows of each row group of a Parquet file."""
    metadata = _parquet(path).metadata
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _delimited_rows(path: Path, form: str, columns: Sequence[str]) -> Iterator[Row]:
    own = column_names(path, form)
    if own is None:
        yield Row(0, None, "is empty")
        return
    places = _places(path, own, columns)
    rows = _csv_rows(path, _DELIMITERS[form])
    next(rows)
    count = 0
    for row in rows:
        count += 1
        if row.fault:
            yield row
        elif len(row.values) != len(own):
            yield Row(row.number, None, f"has {len(row.values)} fields, and the header has {len(own)}")
        else:
            yield Row(row.number, [row.values[place] for place in places], None)
    if not count:
        yield Row(0, None, "holds a header and no rows")


def _csv_rows(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_FIELD)
    # Bytes that are not UTF-8 become lone surrogates, so that one bad row does not end the file.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        while True:
            number = reader.line_num + 1
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                reason = str(error)
                if "unexpected end of data" in reason or "field limit" in reason:
                    raise BadInput(f"{path}, row {number}: a quote that opens here is never closed") from None
                yield Row(number, None, reason)
                continue
            if not values:
                continue  # a blank line
            try:
                "".join(values).encode()
            except UnicodeEncodeError:
                yield Row(number, None, "is not UTF-8")
                continue
            yield Row(number, values, None)


def _json_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    count = 0
    for number, record in _json_records(path):
        count += 1
        if isinstance(record, dict):
            yield Row(number, [record.get(column) for column in columns], None)
        else:
            yield Row(number, None, record)
    if not count:
        yield Row(0, None, "is empty")


def _json_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Line and record, or line and what is wrong; blank lines are no records."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                line.encode()
                record = json.loads(line, parse_constant=_refuse)
            except UnicodeEncodeError:
                yield number, "is not UTF-8"
            except json.JSONDecodeError as error:
                yield number, f"is not JSON: {error.msg} at column {error.colno}"
            except ValueError as error:
                yield number, f"is not JSON: {str(error)[:80]}"
            except RecursionError:
                yield number, "is nested too deeply"
            else:
                yield number, record if isinstance(record, dict) else "is not an object"


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON value")


def _parquet_rows(path: Path, columns: Sequence[str], group: int | None) -> Iterator[Row]:
    import pyarrow

    file = _parquet(path)
    _places(path, file.schema_arrow.names, columns)
    sizes = num_groups(path)
    groups = range(len(sizes)) if group is None else [group]
    number = 1 + (sum(sizes[:group]) if group else 0)
    if not sum(sizes):
        yield Row(0, None, "holds no rows")
        return
    try:
        for batch in file.iter_batches(1024, row_groups=list(groups), columns=list(columns)):
            found = [batch.column(name).to_pylist() for name in columns]
            for values in zip(*found, strict=True):
                yield Row(number, values, None)
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        yield Row(number, None, f"cannot be read, nor what follows: {_first_line(error)}")


def _parquet(path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{path}: is not a Parquet file: {_first_line(error)}") from None


def _places(path: Path, own: Sequence[str], wanted: Sequence[str]) -> list[int]:
    for name in wanted:
        if name not in own:
            raise BadInput(f"{path}: has no column {json.dumps(name)} (it has {', '.join(own)})")
    return [own.index(name) for name in wanted]


def _checked(path: Path, names: Sequence[str]) -> list[str]:
    for place, name in enumerate(names):
        if not name.strip():
            raise BadInput(f"{path}: column {place + 1} has no name")
        if name in names[:place]:
            raise BadInput(f"{path}: has two columns named {json.dumps(name)}")
    return list(names)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
