"""Compare GPT-2 under nine memory budgets and checkpoints: `python -m benchmarks.demo_table`.

table.py   run the rows, check the promises, format them as Markdown
"""
