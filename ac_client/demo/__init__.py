"""The demo: GPT-2 and a U-Net trained plain, with checkpoints around every block, and with our plans.

setting.py        the models, their batches and their seeds
rows.py           one row: memory as the allocator reports it, CPU time and a digest of each step
largest_batch.py  the largest batch in the same memory: plain, checkpoint, ours
comparison.py     the rows, each in its own process and in turn; the check of the results
terminal.py       print the rows with bars
demo_page.py      write the rows and the memory timelines as one HTML file
"""
