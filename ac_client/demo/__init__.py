"""The demo: what a memory budget costs on GPT-2, beside what people do today.

rows.py        what is measured: one row for each way to train, and the child process that measures it
setting.py     the model, its batch and its seeds
child.py       measures one row: memory by PyTorch's own report, step time in pairs, gradients bit by bit
baselines.py   torch.utils.checkpoint around every block, whole and selective, and what they run again
demo.py        runs all rows; the budgets of ours come from the rows before
table.py       the rows and the promises, for a terminal
page.py        the same and the memory timelines, as one HTML file
"""
