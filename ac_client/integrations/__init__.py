"""Plan models inside the training loops of other libraries. Each library has one module; import it yourself.

    loop.py            a plain loop
    accelerate.py      a loop whose model was prepared by accelerate
    transformers.py    transformers' Trainer
    lightning.py       Lightning's Trainer

See docs/integrations.md.
"""
