"""Keep the policies of a repository up to date: `autoac.toml` -> new plans -> policies in a folder.

    config.read_config -> Config -> new_plans.new_plans -> Plans

`new_plans.why_out_of_date` compares a plan with a stored policy.
"""
