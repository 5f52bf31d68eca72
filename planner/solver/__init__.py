"""Find save sets: the integer program, its solver, and the search around them."""
