"""Record a call of a module as one op, and run the module again as a whole in backward."""
