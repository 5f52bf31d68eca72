"""Plans for real architectures against what else decides what to recompute, judged by one simulator.

profiles.py   models on the fake device -> build/bench/profiles/*.json
baselines.py  Graph -> save sets, one function for each baseline
checkmate.py  the optimum where an op may run again any number of times, for small graphs
compare.py    one profile -> build/bench/plans/*.json
report.py     those -> docs/benchmarks.md and its plots
"""
