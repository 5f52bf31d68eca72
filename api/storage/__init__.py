"""Store profiles, policies, jobs and keys in SQLite or PostgreSQL."""
