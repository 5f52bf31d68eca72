"""The demo: GPT-2 trained plain, with checkpoints around every block, and with our plan at that peak.

setting.py      the model, its batch and its seeds
rows.py         one row: memory as the allocator reports it, step times in pairs, gradients bit by bit
comparison.py   run each row in its own process, and check the results
terminal.py     print the rows with bars
demo_page.py    write the rows and the memory timelines as one HTML file
"""
