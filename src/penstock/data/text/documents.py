"""Documents and rows in files: text as it is, JSON, tables with tabs or commas, Parquet; plain or compressed."""

from __future__ import annotations

import csv
import functools
import glob
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.boundary.files import open_regular, printable, quoted, shown, visible_files
from penstock.boundary.packages import package
from penstock.boundary.text import Line, read_json_texts, read_lines
from penstock.boundary.trees import Bounds, parse_json
from penstock.data.text.build import Bad, RowOrBad, TextRow
from penstock.data.text.columns import TextColumns, outer, row_of, value_in
from penstock.data.text.messages import without_nulls
from penstock.disk import digest_file
from penstock.errors import DataError

_log = logging.getLogger(__name__)

TEXTS = (".txt", ".text", ".md")
TABLES = (".jsonl", ".ndjson", ".json", ".tsv", ".csv", ".parquet")
COMPRESSED = (".gz", ".bz2", ".xz")
_PIECE = 1 << 17
"""Characters of a text file that are read at a time."""
_LINE = Bounds(bytes=1 << 24, values=1 << 16, infinite=True, control=True)
_DESCRIPTION = "The text file"
_ROWS = 256
"""Rows of a Parquet file that are read at a time."""
_GROUP_BYTES = 8 << 30
"""Most bytes of a group of rows, with all columns expanded; a larger group is not read."""
_TOO_LONG = 16 << 20
_PARQUET_FAILURES = (OSError, ValueError, KeyError, IndexError, TypeError, NotImplementedError, MemoryError)
"""Exceptions that pyarrow raises on broken files."""


def files_of(path: str) -> list[Path]:
    """The files that a path means, sorted: itself, all text files in a folder, or matches of a pattern (`*.txt`)."""
    root = Path(path)
    if root.is_dir():
        files = [Path(file) for file in visible_files(root)]
        paths = [file for file in files if _suffix(file.name) in (*TEXTS, *TABLES)]
        if ignored := len(files) - len(paths):
            _log.info("%s: %d files of other kinds were left out.", root, ignored)
    elif not root.exists() and any(letter in path for letter in "*?["):
        paths = [Path(name) for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
    else:
        paths = [root]
    if not paths:
        raise DataError(
            f"No file in {shown(path)} ends in {', '.join((*TEXTS, *TABLES))}. Check data.source."
        )
    return sorted(paths)


def digest(path: Path) -> str:
    """The SHA-256 of a file's content. Raises DataError where it cannot be read."""
    with open_regular(path, "The text file") as file:
        status = os.fstat(file.fileno())
    return _digest(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1 << 16)
def _digest(path: Path, _size: int, _changed: int) -> str:
    """Cached, because the splits of a set are opened one after the other."""
    return digest_file(path)


def _suffix(name: str) -> str:
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if suffix in COMPRESSED else suffix


def read_files(files: Sequence[Path], columns: TextColumns) -> Iterator[RowOrBad]:
    """The rows of the files, or their documents."""
    for path in files:
        suffix = _suffix(path.name)
        empty = True
        for row in _rows(path, suffix, columns):
            empty = False
            yield row
        if empty:
            yield Bad(shown(path), 0, "it is empty")


def _rows(path: Path, suffix: str, columns: TextColumns) -> Iterator[RowOrBad]:
    if suffix == ".parquet":
        return _parquet(path, columns)
    if suffix in (".jsonl", ".ndjson", ".json"):
        return _json_lines(path, columns)
    if suffix in (".tsv", ".csv"):
        usual = "\t" if suffix == ".tsv" else ","
        return _table(path, {"auto": usual, "tab": "\t"}.get(columns.separator, columns.separator), columns)
    if columns.shape.form != "documents":
        rows = "Rows" if columns.shape.form == "rows" else "Conversations"
        raise DataError(
            f"{shown(path)} is no table. {rows} are read from files that end in {', '.join(TABLES)}; plain text trains "
            "language models."
        )
    return _document(path, columns.encoding)


def _document(path: Path, encoding: str) -> Iterator[RowOrBad]:
    """Read a text file as one document, in pieces that end with a line."""
    where, pieces = shown(path), list[str]()
    begun, size, first = False, 0, 1
    for line in read_lines(path, _DESCRIPTION, encoding=encoding):
        if line.problem:
            yield Bad(where, line.number, line.problem)
            continue
        if size >= _PIECE:
            yield TextRow(("".join(pieces),), None, where, first, more=True)
            pieces, size, first, begun = [], 0, line.number, True
        pieces.append(line.text + "\n")
        size += len(line.text) + 1
    text = "".join(pieces)
    if begun or text.strip():
        yield TextRow((text,), None, where, first)


def _json_lines(path: Path, columns: TextColumns) -> Iterator[RowOrBad]:
    where = shown(path)
    main: list[str] = []
    for line in read_json_texts(path, _DESCRIPTION, encoding=columns.encoding):
        if line.problem:
            yield Bad(where, line.number, line.problem)
            continue
        if not line.text.strip():
            continue
        try:
            table = parse_json(line.text, "it", error=DataError, bounds=_LINE)
        except DataError as error:
            yield Bad(where, line.number, str(error).rstrip("."))
            continue
        main = main or columns.main(list(table), where)
        names = [*main, *columns.beside(table, main, where)]
        missing = [name for name in names if outer(name, table) not in table]
        if missing:
            yield Bad(where, line.number, f"the column {quoted(missing[0])} is missing")
        else:
            yield row_of([value_in(table, name) for name in names], names, columns, where, line.number)


def _table(path: Path, separator: str, columns: TextColumns) -> Iterator[RowOrBad]:
    """Read a table. Cells separated by tabs have no quotes, as in GLUE's files; others may, as in RFC 4180."""
    where = shown(path)
    names: list[str] = []
    places: list[int] = [int(name) - 1 for name in columns.wanted] if columns.by_number else []
    if places:
        names, width = list(columns.wanted), max(places) + 1
    lines = read_lines(path, _DESCRIPTION, encoding=columns.encoding)
    for number, cells, problem in _cells(lines, separator):
        if problem:
            yield Bad(where, number, problem)
        elif not places:
            names = columns.among(cells, where, nested=False)
            places, width = [cells.index(name) for name in names], len(cells)
        elif any(cells):
            if len(cells) < width or (len(cells) > width and not columns.by_number):
                yield Bad(where, number, f"it has {len(cells)} columns instead of {width}")
            else:
                values = [cells[place] for place in places]
                yield row_of(values, names, columns, where, number, cells=True)


def _cells(lines: Iterator[Line], separator: str) -> Iterator[tuple[int, list[str], str]]:
    """The line number, the cells, and the problem of each row."""
    if separator == "\t":
        for line in lines:
            yield line.number, line.text.split("\t"), line.problem
        return
    csv.field_size_limit(_LINE.bytes)  # the module's own limit, which holds for all its users, is 128 KB
    for line in lines:
        cells, problem = list[str](), ""
        try:
            cells = next(csv.reader(_lines_of_row(line, lines), delimiter=separator, strict=True), [])
        except csv.Error as error:
            problem = f"it is no row of a table: {error}"
        except ValueError as error:
            problem = str(error)
        yield line.number, cells, problem


def _lines_of_row(line: Line, following: Iterator[Line]) -> Iterator[str]:
    """The lines of a row, which a cell in quotes may continue, as far as they are asked for. Raises ValueError."""
    size = 0
    while not line.problem:
        size += len(line.text) + 1
        if size > _LINE.bytes:
            raise ValueError("a quotation mark is opened and not closed for millions of characters")
        yield line.text + "\n"
        line = next(following, Line(0, "", "a quotation mark is opened and never closed"))
    raise ValueError(line.problem)


def _parquet(path: Path, columns: TextColumns) -> Iterator[RowOrBad]:
    """Read a Parquet file, a few rows at a time. Raises DataError for missing columns; other faults make bad rows."""
    where = shown(path)
    parquet = package("pyarrow.parquet", f"{where} is read by the package pyarrow", "hf")
    number = 0
    with open_regular(path, _DESCRIPTION) as raw:
        try:
            file = parquet.ParquetFile(
                raw, memory_map=False, pre_buffer=False, thrift_string_size_limit=1 << 20
            )
            names = columns.among([str(name) for name in file.schema_arrow.names], where)
            # Statistics of columns are not read: if these are broken, pyarrow 26 ends the process.
            for group in range(file.metadata.num_row_groups):
                size = file.metadata.row_group(group).total_byte_size
                if not 0 <= size <= _GROUP_BYTES:
                    raise ValueError(
                        f"a group of rows claims {size:,} bytes, and at most {_GROUP_BYTES:,} are read"
                    )
            for batch in file.iter_batches(batch_size=_ROWS, columns=names, use_threads=False):
                for row in batch.to_pylist():
                    values = [without_nulls(value_in(row, name)) for name in names]
                    number += 1
                    if any(isinstance(value, str) and len(value) > _TOO_LONG for value in values):
                        yield Bad(where, number, f"it holds a text of more than {_TOO_LONG:,} characters")
                    else:
                        yield row_of(values, names, columns, where, number)
        except _PARQUET_FAILURES as error:
            why = " ".join(printable(str(error)).split())[:300].rstrip(".") or type(error).__name__
            yield Bad(where, number + 1, f"the file cannot be read further: {why}")
