"""A row of named fields as a file or a data set has it, before any task makes sense of it."""

from collections.abc import Mapping

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row.

    Attributes:
        fields: Values by name, in the source's order: strings from tables and text, anything from JSON and data sets.
        line: Line of the file where the row starts, from 1; 0 if it did not come from a file's line.
    """

    fields: Mapping[str, object]
    line: int = 0
