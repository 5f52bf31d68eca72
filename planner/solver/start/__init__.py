"""Find save sets without a solver: what a search starts from."""
