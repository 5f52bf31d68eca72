"""Budgets inside the loops of others: one module for each library, none of them imported from here.

    loop.py            a plain loop
    accelerate.py      a loop whose model was prepared by accelerate
    transformers.py    transformers' Trainer
    lightning.py       Lightning's Trainer

docs/integrations.md is the page.
"""
