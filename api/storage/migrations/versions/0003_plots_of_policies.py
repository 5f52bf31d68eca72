"""Store the plots of policies"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "drawings",
        sa.Column("policy_id", sa.String(length=64), nullable=False),
        sa.Column("drawn_by", sa.String(length=64), nullable=False),
        sa.Column("drawn_at", sa.Double(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["policy_id"], ["policies.id"], name=op.f("fk_drawings_policy_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("policy_id", name=op.f("pk_drawings")),
    )
    with op.batch_alter_table("drawings", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_drawings_drawn_at"), ["drawn_at"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("drawings", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_drawings_drawn_at"))

    op.drop_table("drawings")
