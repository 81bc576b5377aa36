"""Rows of Parquet files, through pyarrow, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.boundary.files import open_regular, printable, shown
from penstock.data.text.build import Bad, RowOrBad
from penstock.data.text.columns import TextColumns, row_of, value_in

_ROWS = 256
_GROUP_BYTES = 8 << 30
"""Most bytes of a group of rows, with all columns expanded; a larger group is not read."""
_TOO_LONG = 16 << 20


def read_rows(parquet: Any, path: Path, columns: TextColumns) -> Iterator[RowOrBad]:
    """Raises DataError where it lacks the columns; what else is wrong is a bad row."""
    where = shown(path)
    number = 0
    with open_regular(path, "The text file") as raw:
        try:
            file = parquet.ParquetFile(
                raw, memory_map=False, pre_buffer=False, thrift_string_size_limit=1 << 20
            )
            names = columns.among([str(name) for name in file.schema_arrow.names], where)
            _check_sizes(file)
            for batch in file.iter_batches(batch_size=_ROWS, columns=names, use_threads=False):
                columns_read = {name: batch.column(name).to_pylist() for name in batch.schema.names}
                for place in range(batch.num_rows):
                    row = {name: values[place] for name, values in columns_read.items()}
                    values = [value_in(row, name) for name in names]
                    number += 1
                    if any(isinstance(value, str) and len(value) > _TOO_LONG for value in values):
                        yield Bad(where, number, f"it holds a text of more than {_TOO_LONG:,} characters")
                    else:
                        yield row_of(values, names, columns.shape, where, number)
        except (
            OSError,
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            NotImplementedError,
            MemoryError,
        ) as error:
            why = " ".join(printable(str(error)).split())[:300].rstrip(".") or type(error).__name__
            yield Bad(where, number + 1, f"the file cannot be read further: {why}")


def _check_sizes(file: Any) -> None:
    """Check the groups' sizes by what they say themselves. Asked about a column whose statistics are broken, pyarrow 26
    ends the process.
    """
    for group in range(file.metadata.num_row_groups):
        size = file.metadata.row_group(group).total_byte_size
        if not 0 <= size <= _GROUP_BYTES:
            raise ValueError(f"a group of rows claims {size:,} bytes, and at most {_GROUP_BYTES:,} are read")
