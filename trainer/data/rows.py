"""Rows of a table file, one by one, each with its place and either its values or what is wrong with it.

    columns = column_names(path, "csv")
    for piece in pieces(path, "csv", 32 * 1024**2):
        for row in read_rows(path, "csv", columns, piece): row.number, row.values, row.fault

What cannot be told apart any more (a quote that is never closed, two columns of one name) is refused; everything else is a
bad row, and the next one is read.
"""

import csv
import io
import json
import mmap
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.source import is_text
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


class Piece(NamedTuple):
    """Some consecutive whole rows of a text file."""

    start: int
    """Its first byte."""
    end: int
    """The byte after its last one."""
    num_lines: int
    """Lines of the file that stand before it."""


def read_rows(path: Path, form: str, columns: Sequence[str], some: Piece | int | None = None) -> Iterator[Row]:
    """The rows of a file.

    Args:
        path: The file.
        form: `csv`, `tsv`, `jsonl` or `parquet`.
        columns: Names of the columns wanted, in this order.
        some: A piece of a text file, or a row group of a Parquet file. None: all.

    Raises:
        BadInput: A column is missing, or a quote is never closed.
    """
    if form == "parquet":
        return _parquet_rows(path, columns, some)
    if form == "jsonl":
        return _json_rows(path, columns, some)
    return _delimited_rows(path, form, columns, some)


def pieces(path: Path, form: str, num_bytes: int) -> list[Piece]:
    """Cuts a text file between rows, so that several processes can read it.

    A line that ends inside quotes ends no row. Behind a quote that is not closed, or closed within a field, nothing is cut:
    what a reader makes of the rest depends on where it began.

    Args:
        path: The file.
        form: `csv`, `tsv` or `jsonl`.
        num_bytes: Least size of each piece but the last.
    """
    size = path.stat().st_size
    if size <= num_bytes:
        return [Piece(0, size, 0)]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cuts, wanted = [0], num_bytes
        for low, high in [(0, size)] if form == "jsonl" else _outside_quotes(data, _DELIMITERS[form]):
            while wanted < high and (place := data.find(b"\n", max(low, wanted - 1), high)) >= 0:
                cuts.append(place + 1)
                wanted = place + 1 + num_bytes
        found, num_lines = [], 0
        for start, end in zip(cuts, [*cuts[1:], size], strict=True):
            if start == end:
                continue  # the last cut was at the end
            found.append(Piece(start, end, num_lines))
            text = data[start:end]
            num_lines += text.count(b"\n")
            if form != "jsonl":  # a reader of these takes a lone carriage return for the end of a line
                num_lines += text.count(b"\r") - text.count(b"\r\n")
        return found


def _outside_quotes(data: mmap.mmap, delimiter: str) -> Iterator[tuple[int, int]]:
    """Ranges of a table that stand in no quotes, up to the first quote that is wrong."""
    opens = rf'"(?:(?<=[{delimiter}\n\r]")|(?<=\A")|(?<=\A\xef\xbb\xbf"))'
    quoted = re.compile(rf'{opens}[^"]*+(?:""[^"]*+)*+(?:"(?=[{delimiter}\n\r]|\Z)|(?P<wrong>"|\Z))'.encode("latin-1"))
    low = 0
    for match in quoted.finditer(data):
        yield low, match.start()
        if match["wrong"] is not None:
            return
        low = match.end()
    yield low, len(data)


def num_groups(path: Path) -> list[int]:
    """Rows of each row group of a Parquet file."""
    metadata = _parquet(path).metadata
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _delimited_rows(path: Path, form: str, columns: Sequence[str], piece: Piece | None) -> Iterator[Row]:
    own = column_names(path, form)
    if own is None:
        yield Row(0, None, "is empty")
        return
    places = _places(path, own, columns)
    rows = _csv_rows(path, _DELIMITERS[form], piece)
    if not piece or not piece.start:
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
    if not count and _is_all(path, piece):
        yield Row(0, None, "holds a header and no rows")


def _csv_rows(path: Path, delimiter: str, piece: Piece | None = None) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_FIELD)
    before = piece.num_lines if piece else 0
    with _opened(path, piece, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        while True:
            number = before + reader.line_num + 1
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


def _opened(path: Path, piece: Piece | None, newline: str) -> io.TextIOWrapper:
    """A text file or a piece of it. Bytes that are not UTF-8 become lone surrogates, so that one bad row does not end it."""
    raw = path.open("rb", buffering=0) if piece is None else _Section(path, piece)
    encoding = "utf-8" if piece and piece.start else "utf-8-sig"
    return io.TextIOWrapper(io.BufferedReader(raw, 1 << 16), encoding, errors="surrogateescape", newline=newline)


class _Section(io.FileIO):
    """Some bytes of a file."""

    def __init__(self, path: Path, piece: Piece) -> None:
        super().__init__(path)
        self.seek(piece.start)
        self._left = piece.end - piece.start

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(memoryview(buffer)[: self._left])
        self._left -= count
        return count


def _is_all(path: Path, piece: Piece | None) -> bool:
    return piece is None or (piece.start == 0 and piece.end == path.stat().st_size)


def _json_rows(path: Path, columns: Sequence[str], piece: Piece | None) -> Iterator[Row]:
    count = 0
    for number, record in _json_records(path, piece):
        count += 1
        if isinstance(record, dict):
            yield Row(number, [record.get(column) for column in columns], None)
        else:
            yield Row(number, None, record)
    if not count and _is_all(path, piece):
        yield Row(0, None, "is empty")


def _json_records(path: Path, piece: Piece | None = None) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Line and record, or line and what is wrong; blank lines are no records."""
    with _opened(path, piece, newline="\n") as file:
        for number, line in enumerate(file, 1 + (piece.num_lines if piece else 0)):
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
        if not is_text(name):
            raise BadInput(f"{path}: the name of column {place + 1} is not valid Unicode: {name!a}")
        if name in names[:place]:
            raise BadInput(f"{path}: has two columns named {json.dumps(name)}")
    return list(names)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
