"""Raw content of Parquet files: typed columns, decoded a batch at a time within the limits of tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemblekit import DataError
from ensemblekit_datasets import table_files
from ensemblekit_datasets.table_files import (
    Array,
    Declared,
    RawTable,
    check_distinct,
    memory_share,
    memory_size,
    too_much,
)

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

ROWS_PER_BATCH = 4096
_UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
"""How pandas stores an index without a name, which is no column of the table."""


def read_parquet(path: Path) -> RawTable:
    """Read the columns of a Parquet file that are numbers, text, categories, booleans, dates or times.

    Raises:
        DataError: pyarrow is not installed; the file is not a Parquet file, is damaged, or exceeds a limit.
        OSError: It cannot be opened.
    """
    if find_spec("pyarrow") is None:
        fix = "pip install 'ensemblekit[parquet]', or save the table as CSV"
        raise DataError("Parquet needs the package pyarrow, which is not installed", str(path), fix)
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    with path.open("rb") as stream:
        try:
            with ParquetFile(stream, page_checksum_verification=True) as file:
                return _table(file, path)
        except (ArrowException, OSError, ValueError, OverflowError) as error:  # OSError: of thrift, about any content
            what = f"not a Parquet file that can be read: {error!s:.300}"
            raise DataError(what, str(path), "write it again, for example with pandas' to_parquet") from error


def _table(file: ParquetFile, path: Path) -> RawTable:
    from pyarrow import types

    fields = {field.name: field.type for field in file.schema_arrow if not _UNNAMED_INDEX.fullmatch(field.name)}
    if len(file.schema_arrow) > table_files.MAX_COLUMNS:
        raise too_much(f"it has {len(file.schema_arrow):,} columns", path)
    check_distinct([field.name for field in file.schema_arrow], str(path))
    declared = {name: kind for name, kind in ((name, _declared(kind)) for name, kind in fields.items()) if kind}
    declared |= {name: "text" for name in _categoricals(file.schema_arrow) if name in declared}
    refused = {name: str(kind) for name, kind in fields.items() if name not in declared and not types.is_null(kind)}
    _check_size(file, declared, path)
    read = _columns(file, declared, path)
    nothing = np.full(file.metadata.num_rows, None, dtype=object)
    by_name = {name: read.get(name, nothing) for name in fields}
    if any(len(column) != len(nothing) for column in by_name.values()):
        raise ValueError(f"it declares {len(nothing):,} rows, but has others")
    return RawTable(str(path), by_name, "row", range(file.metadata.num_rows), declared, refused)


def _declared(kind: Any) -> Declared | None:
    """What a type says about a column; None if it says nothing, or if the column cannot be used."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return "text" if _declared(kind.value_type) else None
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if str(kind) in ("string", "large_string", "string_view"):
        return "text"
    return "date" if types.is_temporal(kind) else None


def _categoricals(schema: Any) -> list[str]:
    """The columns that pandas had as categories; Parquet has types for categories of text alone."""
    metadata = schema.pandas_metadata
    columns = metadata.get("columns") if isinstance(metadata, dict) else None
    tables = [column for column in columns if isinstance(column, dict)] if isinstance(columns, list) else []
    return [str(column.get("name")) for column in tables if column.get("pandas_type") == "categorical"]


def _check_size(file: ParquetFile, declared: Mapping[str, Declared], path: Path) -> None:
    """Refuse a file by the sizes that it declares, before anything is decoded."""
    per_row = sum(
        table_files.BYTES_PER_NUMBER if kind == "number" else table_files.BYTES_PER_TEXT for kind in declared.values()
    )
    metadata = file.metadata
    stored = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
    needed = metadata.num_rows * per_row + stored
    if needed > memory_share():
        raise too_much(f"its {metadata.num_rows:,} rows take {memory_size(needed)} in memory", path)


def _columns(file: ParquetFile, declared: Mapping[str, Declared], path: Path) -> dict[str, Array]:
    """Decode columns; a file that decodes to more than it declares is refused on the way."""
    import pyarrow

    limit = memory_share()
    chunks: dict[str, list[Any]] = {name: [] for name in declared}
    needed = 0
    for batch in file.iter_batches(ROWS_PER_BATCH, columns=list(declared)):
        needed += batch.nbytes
        if needed > limit:
            raise too_much(f"its first rows take {memory_size(needed)} in memory", path)
        for name, kind in declared.items():
            column = batch.column(name)
            chunks[name].append(column if kind == "number" else _categories(column))
    return {
        name: _array(pyarrow.chunked_array(parts).unify_dictionaries().combine_chunks())
        for name, parts in chunks.items()
        if parts
    }


def _categories(column: Any) -> Any:
    """Text, a category or a date as categories of text: each is kept once in a batch."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_duration(column.type):
        column = column.cast(pyarrow.int64())
    if types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pyarrow.timestamp(column.type.unit))  # in UTC; no data base of time zones is needed
    return column.cast(pyarrow.string()).dictionary_encode()


def _array(column: Any) -> Array:
    """Numbers as they are, or as Python's numbers where numpy would change them; text with None where it is missing."""
    from pyarrow import types

    if types.is_dictionary(column.type):
        values = np.array([*column.dictionary.to_pylist(), None], dtype=object)
        texts: Array = values[column.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)]
        return texts
    if types.is_decimal(column.type) or (column.null_count and not types.is_floating(column.type)):
        return np.array(column.to_pylist(), dtype=object)
    numbers: Array = column.to_numpy(zero_copy_only=False)
    return numbers
