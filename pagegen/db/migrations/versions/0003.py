"""A table of leases: who measures what just now."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Version 2 to 3."""
    op.create_table(
        "leases",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("what", sa.Text, nullable=False),
    )


def downgrade() -> None:
    """Version 3 to 2. Leases say who works at this moment, and are no record: they go."""
    op.drop_table("leases")
