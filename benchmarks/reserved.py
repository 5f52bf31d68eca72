"""Train six models within 95 % of what plain training reserves of a device, on the stand-in for a GPU.

    python -m benchmarks.reserved [--only NAME ...] [--steps 50]

Each model trains plainly first. The device is then limited to 95 % of what that has reserved, or less if
plain training fits there, and the model trains with `budget_gb="device"`. Reported for each model: the
first step that ran out of memory, if one did; by how much the reserved bytes of `report()` differ from the
device's counter after the first, second, third and last step, and at most after the third. A row fails if
a planned step runs out of memory, or if a prediction is off by 5 % in the end.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SHARE = 0.95
MOST_OFF = 0.05
NAMES = ("GPT-2", "Llama", "ViT", "ResNet", "U-Net", "LSTM")


def train(device: ModuleType, name: str, steps: int, limit: int, *, planned: bool) -> list[tuple[int, int]]:
    """Train in `steps` steps on a device of `limit` bytes.

    Returns:
        Reserved bytes after each step, predicted and counted. A step that runs out of memory ends the list.
    """
    import torch

    import ac_client
    from benchmarks.models.medium import MODELS

    gc.collect()
    torch.cuda.empty_cache()
    device.set_limit(0, limit)
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.to("cuda").train()
    on_device = {key: value.cuda() if hasattr(value, "cuda") else value for key, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    if planned:
        ac_client.apply(model, budget_gb="device", optimizer=optimizer)
    after: list[tuple[int, int]] = []
    try:
        for _ in range(steps):
            out = model(**on_device)
            loss = out["loss"]
            del out
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            predicted = ac_client.applied(model).report().predicted_reserved_bytes if planned else 0
            after.append((predicted or 0, torch.cuda.memory_reserved()))
    except torch.OutOfMemoryError:
        pass
    return after


def row(device: ModuleType, name: str, steps: int) -> tuple[str, bool]:
    plain = train(device, name, 3, 1 << 50, planned=False)
    limit = int(SHARE * plain[-1][1])
    while len(train(device, name, 3, limit, planned=False)) == 3:  # with its cache freed
        limit = int(SHARE * limit)
    after = train(device, name, steps, limit, planned=True)
    off = [predicted / counted - 1 for predicted, counted in after]
    worst = max((abs(one) for one in off[3:]), default=1.0)
    fine = len(after) == steps and worst <= MOST_OFF
    cells: list[Any] = [
        name,
        f"{plain[-1][1] / 2**20:,.0f}",
        f"{limit / 2**20:,.0f}",
        f"out of memory in step {len(after) + 1}" if len(after) < steps else f"{steps} steps",
        f"{max((counted for _, counted in after), default=0) / limit:.3f}",
        *(f"{100 * off[i]:+.1f}" if len(off) > abs(i) - (i < 0) else "" for i in (0, 1, 2, -1)),
        f"{100 * worst:.1f}",
        "yes" if fine else "NO",
    ]
    return "| " + " | ".join(cells) + " |", fine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from standin import cuda  # type: ignore[import-not-found]
    from standin.library import library  # type: ignore[import-not-found]

    device = cuda.load(library())
    head = ["model", "plain reserves, MiB", "limit, MiB", "planned", "most reserved / limit"]
    head += ["predicted after step 1, %", "2", "3", "last", "most off after step 3, %", "fine"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    good = True
    for name in options.only:
        text, fine = row(device, name, options.steps)
        print(text, flush=True)
        good &= fine
    sys.exit(not good)


if __name__ == "__main__":
    main()
