"""Add shapes, parameters and names of models, and outlines of frontiers"""

from __future__ import annotations

import json

import sqlalchemy as sa
import zstandard
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "model_names",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("named_at", sa.Double(), nullable=False),
        sa.Column("named_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_model_names")),
    )
    op.add_column("jobs", sa.Column("drawing", sa.LargeBinary(), nullable=True))
    op.add_column("profiles", sa.Column("inputs", sa.Text(), nullable=False, server_default="[]"))
    op.add_column(
        "profiles", sa.Column("parameter_bytes", sa.BigInteger(), nullable=False, server_default="0")
    )
    connection = op.get_bind()
    numbers = connection.execute(sa.text("SELECT number FROM profiles")).scalars().all()
    for number in numbers:  # one at a time: a profile may have megabytes
        content = connection.execute(
            sa.text("SELECT content FROM profiles WHERE number = :number"), {"number": number}
        ).scalar_one()
        profile = json.loads(zstandard.decompress(content))
        connection.execute(
            sa.text("UPDATE profiles SET inputs = :inputs, parameter_bytes = :nbytes WHERE number = :number"),
            {
                "inputs": json.dumps(profile["inputs"]),
                "nbytes": profile["static"]["parameters"],
                "number": number,
            },
        )


def downgrade() -> None:
    op.drop_column("profiles", "parameter_bytes")
    op.drop_column("profiles", "inputs")
    op.drop_column("jobs", "drawing")
    op.drop_table("model_names")
