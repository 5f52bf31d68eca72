"""Generate random programs of ops, views, in-place writes and randomness, to compare with autograd."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from autoac.tape.runtime.cursor import UseGroup
from autoac.tape.runtime.cuts import Cuts
from autoac.tape.runtime.policy_context import save_recompute_policy

ROWS, COLUMNS = 4, 6
KINDS = 19  # of instructions
WRITES = range(12, 16)  # those that write in place


@dataclass(frozen=True)
class Program:
    """A forward pass generated from a seed; it is the same every time it runs."""

    seed: int
    length: int

    def run(
        self, inputs: list[Tensor], *, nested: Callable[[random.Random], object] | None = None
    ) -> list[Tensor]:
        """Run the program and return its differentiable results."""
        chance, nesting = random.Random(self.seed), random.Random(self.seed + 1)
        pool = list(inputs)
        regions: list[save_recompute_policy] = []
        for _ in range(self.length):
            if nested is not None and nesting.random() < 0.15:
                if regions and nesting.random() < 0.5:
                    regions.pop().__exit__(None, None, None)
                else:
                    level = UseGroup(0) if nesting.random() < 0.7 else None
                    regions.append(save_recompute_policy(nested(nesting), checkpoint=level))
                    regions[-1].__enter__()
            a, b = chance.choice(pool), chance.choice(pool)
            made = run_instruction(chance.randrange(KINDS), a, b)
            if made is not None:
                pool.append(made)
        while regions:
            regions.pop().__exit__(None, None, None)
        return [t for t in pool[len(inputs) :] if t.requires_grad][-3:]


def run_instruction(kind: int, a: Tensor, b: Tensor) -> Tensor | None:
    """Return what an op makes of `a` and `b`; None if it only writes into `a`, or may not."""
    flat = a.reshape(ROWS, COLUMNS) if a.numel() == ROWS * COLUMNS else a.flatten()[: ROWS * COLUMNS]
    other = b if b.shape == a.shape else b.reshape(a.shape) if b.numel() == a.numel() else a
    inner = a.requires_grad and not a.is_leaf
    match kind:
        case 0:
            return a.sin()
        case 1:
            return torch.tanh(a) * other
        case 2:
            return a + other
        case 3:
            return a.exp().clamp(max=3.0)
        case 4:
            return torch.nn.functional.dropout(a, 0.4)
        case 5:
            return a * torch.rand_like(a)
        case 6:
            return a.t() if a.dim() == 2 else a.unsqueeze(0)
        case 7:
            return a[: max(1, len(a) // 2)]
        case 8:
            return flat.clone()
        case 9:
            return a.cumsum(0).sigmoid()
        case 10:
            return (a @ other.t()).tanh() if a.dim() == other.dim() == 2 else a.mul(0.5)
        case 11:
            return torch.cat([a, other]) if a.numel() < 64 else a.neg()
        case 12 if inner:
            a.mul_(1.5)
        case 13 if inner:
            a[:1].add_(other[:1].detach())
        case 14 if inner:
            a.copy_(other.clone())
        case 15 if inner:
            a[..., ::2].sigmoid_()
        case 16:
            buffer = torch.zeros_like(a)
            buffer[: len(a)].copy_(other)
            return buffer * a
        case 17:
            return torch.relu_(a * other)
        case 18:
            return torch.nn.functional.layer_norm(a, a.shape[-1:])
        case _:
            return None
    return None


def gradients(
    program: Program,
    policy: object,
    *,
    nested: bool = False,
    twice: bool = False,
    cuts: Cuts | None = None,
) -> list[Tensor | None] | str:
    """Return the gradients of the inputs and the results, or the kind of error that autograd raises.

    With `policy` None, run the program plainly.
    """
    torch.default_generator.manual_seed(program.seed)  # a tenth of the time of `torch.manual_seed`
    inputs = [torch.randn(ROWS, COLUMNS, requires_grad=True) for _ in range(2)] + [torch.randn(ROWS, COLUMNS)]
    chooser = _policy if nested and policy is not None else None
    try:
        with nullcontext() if policy is None else save_recompute_policy(policy, cuts=cuts):
            results = program.run(inputs, nested=chooser)
        if not results:
            return []
        loss = torch.stack([(r * r).sum() for r in results]).sum()
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            return "modified"
        if "a view of" in str(error) or "leaf Variable" in str(error) or "leaf variable" in str(error):
            return "refused"
        raise
    return [*(i.grad for i in inputs), *(r.detach() for r in results), torch.get_rng_state()]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if two tensors are equal bit for bit, or both missing."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _policy(chance: random.Random) -> object:
    probability = chance.random()
    coin = random.Random(chance.random())
    return lambda ctx, out, op, *args, **kwargs: coin.random() < probability
