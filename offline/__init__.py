"""What runs without anything installed but Python: the check of policy files, and the way to it."""
