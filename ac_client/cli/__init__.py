"""The `autoac` command. Each file imports torch and the planner inside its functions, when they run."""
