"""The planners that are compared: each is a function `plan(graph, budget) -> events`.

ours.py               this project's planner
save_sets.py          rules that choose what to save once: blocks, sqrt(n), torch's knapsacks, sac_milp, a cut
eviction.py           DTR and LRU: evict when memory runs out, online
checkmate_program.py  Checkmate's program under HiGHS, with a cap on time
published.py          the schedules that authors published
"""
