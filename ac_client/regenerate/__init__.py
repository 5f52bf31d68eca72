"""Keeps the policies of a repository fresh: `autoac.toml` -> what changed -> policies in a folder.

    settings.read -> Settings -> run.regenerate -> Outcome -> telling.text | as_data | github

docs/regenerate.md is the page of the command, and says what counts as drift.
"""
