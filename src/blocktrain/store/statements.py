"""Statements that every call needs: SQLAlchemy writes each once, the driver executes it.

To go through SQLAlchemy every time takes ten times as long as SQLite's own work.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection


class Statement:
    """One statement as text. Errors are the driver's."""

    def __init__(self, made: sa.sql.ClauseElement) -> None:
        compiled: Any = made.compile(dialect=sqlite.dialect(paramstyle="named"))
        self._text, self._fixed = (
            str(compiled),
            {name: value for name, value in compiled.params.items() if value is not None},
        )

    def run(self, db: Connection, values: Mapping[str, Any]) -> sqlite3.Cursor:
        """Execute it within the transaction."""
        return driver(db).execute(self._text, {**self._fixed, **values})

    def run_each(self, db: Connection, rows: Iterable[Mapping[str, Any]]) -> None:
        """Execute it for every row."""
        driver(db).executemany(self._text, ({**self._fixed, **row} for row in rows))


def driver(db: Connection) -> sqlite3.Connection:
    """The connection below SQLAlchemy's."""
    found: sqlite3.Connection | None = db.connection.driver_connection
    if found is None:
        raise sqlite3.ProgrammingError("the connection is closed")
    return found
