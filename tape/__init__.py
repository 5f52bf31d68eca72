"""Record and run steps: which ops ran on which versions of which storages, and what of them is made again.

The floor below `profiler` and `ac_client`: a region runs the ops of a step under a policy, or without one,
and its tape is what a profile is made of. Profiles, plans and budgets are made above; the words that they
share with this package are those of `planner/formats`.
"""
