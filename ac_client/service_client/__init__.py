"""Ask a planning service for a policy. Imports no torch."""
