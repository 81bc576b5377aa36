"""Text datasets of the Hugging Face hub, or that `datasets` saved, through the datasets library."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from penstock.config.run import DataConfig
from penstock.data.hub import identity_of, open_dataset
from penstock.data.splits import hub_splits
from penstock.data.text.build import Bad, RowOrBad
from penstock.data.text.columns import Content, TextColumns, row_of, value_in
from penstock.data.text.messages import without_nulls
from penstock.errors import ConfigError


def hub_rows(name: str, data: DataConfig, columns: TextColumns) -> Content:
    """The rows of `NAME`, or of its configuration `NAME:CONFIGURATION`. Splits are its own.

    Raises ConfigError, DataError and EnvironmentProblem where it cannot be had.
    """
    dataset, _, configuration = name.partition(":")
    splits = open_dataset(dataset, configuration or None, streaming=data.streaming)
    first, val = hub_splits(list(splits), dataset)
    identity = [[split, identity_of(splits[split])] for split in (first, *val)]
    parts: list[Iterator[RowOrBad]] = [
        itertools.chain.from_iterable(_rows(splits[split], f"hf:{name}, {split}", columns) for split in part)
        for part in ([first], val) if part
    ]  # fmt: skip
    return Content(parts, [name, data.streaming, identity])


def _rows(rows: Any, where: str, columns: TextColumns) -> Iterator[RowOrBad]:
    features = rows.features
    if features is None:  # a stream tells its columns with its first row
        features = next(iter(rows.take(1)), {})
    if columns.by_number:
        raise ConfigError(f"{where} has named columns; give data.columns their names.")
    names = columns.among([str(name) for name in features], where)
    classes = getattr(features.get(names[-1]), "names", None) if columns.shape.labels else None
    outer = list(dict.fromkeys(name if name in features else name.partition(".")[0] for name in names))
    for number, row in enumerate(rows.select_columns(outer), start=1):
        values = [without_nulls(value_in(row, name)) for name in names]
        if columns.shape.labels and isinstance(values[-1], int) and classes:
            if not 0 <= values[-1] < len(classes):
                yield Bad(where, number, f"its class is {values[-1]}, which means none")
                continue
            values[-1] = classes[values[-1]]
        yield row_of(values, names, columns, where, number)
