"""Branch and bound over the decisions that the relaxation leaves open."""
