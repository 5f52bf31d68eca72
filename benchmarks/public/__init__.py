"""Compare recompute planners on identical graphs; an independent checker judges every schedule.

check.py          the judge: standard library only, shares no code with any planner
step_graph.py     the graphs' format, and the type of a planner
readers/          other formats -> StepGraph
planners/         (graph, budget) -> events, one file for each family
planner_graph.py  StepGraph <-> the planner's Graph; its schedule -> events
instances.py      graphs and budgets
training.py       real steps at equal measured peak; torch_ways.py has the other ways
run.py, page.py   rows; the page with its picture and CSV file, from the text in page.md
"""
