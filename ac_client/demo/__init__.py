"""The demo: GPT-2 trained plain, with checkpoints around every block, and with our plans at two budgets.

setting.py      the model, its batch and its seeds
rows.py         one row: memory as the allocator reports it, CPU time and a digest of each step
comparison.py   the rows, each in its own process and in turn; the check of the results
terminal.py     print the rows with bars
demo_page.py    write the rows and the memory timelines as one HTML file
"""
