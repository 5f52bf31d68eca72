"""Run the service and its maintenance commands."""
