"""Compare our plans for real architectures with nine baselines; one simulator judges all.

profiles.py   models on a described device -> build/bench/plans/*.json.zst
baselines.py  the table of baselines: Graph -> save sets; block_rules.py, knapsacks.py, sac_milp.py and
              minimum_cut.py have them
compare.py    one profile -> build/bench/plans/*.json
report.py     comparisons -> Markdown and plots
near_minimum.py  plans a little above the minimum peak -> Markdown
ablation.py   plans with one part of the solver switched off
"""
