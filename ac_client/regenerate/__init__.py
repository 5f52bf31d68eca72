"""Keep the policies of a repository up to date: `autoac.toml` -> what changed -> policies in a folder.

    config.read -> Config -> drift.regenerate -> Outcome -> outcome_formats.as_text, as_data, as_annotations

docs/regenerate.md describes the command and says what counts as drift.
"""
