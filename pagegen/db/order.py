"""The order of texts: by code point on every database, as SQLite and Python have it. PostgreSQL otherwise goes by its
locale, in which dates and names sort differently from server to server."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class by_code_point(FunctionElement[str]):  # noqa: N801  reads as the SQL function that it stands for
    """A text column as it is ordered: `order_by(by_code_point(column).desc())`."""

    inherit_cache = True
    name = "by_code_point"


@compiles(by_code_point)
def _plain(element: by_code_point, compiler: Any, **how: Any) -> str:
    return str(compiler.process(element.clauses, **how))


@compiles(by_code_point, "postgresql")
def _with_collation(element: by_code_point, compiler: Any, **how: Any) -> str:
    return f'{compiler.process(element.clauses, **how)} COLLATE "C"'
