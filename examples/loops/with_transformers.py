"""Run transformers' Trainer under a memory budget with one callback: a tiny GPT-2 on random tokens.

python examples/loops/with_transformers.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ac_client.integrations.transformers import AutoACCallback


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(128, (30, 64))]
    callback = AutoACCallback(budget_gb=0.007, measure=True)  # the one line
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=1,
                per_device_train_batch_size=8,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=rows,
            callbacks=[callback],
        )
        trainer.train()
    print(callback.report)


if __name__ == "__main__":
    main()
