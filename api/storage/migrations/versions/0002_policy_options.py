"""Store the options of each policy, so that a search under other options does not find it"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "policy_options",
        sa.Column("policy_id", sa.String(length=64), nullable=False),
        sa.Column("headroom_bytes", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("gap", sa.Double(), nullable=False),
        sa.Column("time_limit_s", sa.Double(), nullable=False),
        sa.Column("constraints_digest", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["policy_id"], ["policies.id"], name=op.f("fk_policy_options_policy_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint(
            "policy_id",
            "headroom_bytes",
            "gap",
            "time_limit_s",
            "constraints_digest",
            name=op.f("pk_policy_options"),
        ),
    )


def downgrade() -> None:
    op.drop_table("policy_options")
