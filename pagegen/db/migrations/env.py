"""What Alembic runs: the migrations on the connection that `migrate` passes, in its transaction."""

from __future__ import annotations

from alembic import context

from pagegen.db.schema import metadata, revision

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=revision.name,
    transactional_ddl=True,  # SQLite's data definitions are transactional, which Alembic does not assume
)
context.run_migrations()
