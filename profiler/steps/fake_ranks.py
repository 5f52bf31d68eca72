"""Stand for one rank of many, on tensors without memory: profile a cluster's step on a laptop.

The process group sends nothing, so the other ranks need not exist. Models that are built inside, sharded or
tensor-parallel, have no memory, and neither have the steps that are profiled there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from autoac.tape.capture.known_values import KnownValues
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.private import FakeTensorMode
from autoac.tape.torch_facts.storage_table import fakes_have_storages


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be rank `rank` of `world_size` ranks inside of the with-block, where tensors take no memory.

    The block's code builds meshes and shards its model as every rank of a training script does, on the CPU
    (`init_device_mesh("cpu", (64, 8))`). `profile(..., on=...)` there returns what this rank would hold on
    such a device, and the run times of its ops. Communication takes no time.

    Raises:
        RuntimeError: a process group exists already.
        ValueError: `rank` is not one of `world_size`.
    """
    import torch.distributed as dist

    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be at least 0 and below world_size={world_size}, got {rank}")
    if dist.is_initialized():
        raise RuntimeError(
            f"a process group of {dist.get_world_size()} ranks exists: leave init_process_group out, or call "
            "it in another process"
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=private.fake_store())
    fakes = _FakesOfRank(allow_non_fake_inputs=True)
    are_we_tracing = private.functional_collectives()._are_we_tracing
    before = are_we_tracing.__code__
    are_we_tracing.__code__ = _no.__code__  # callers have imported it by name
    try:
        with ExitStack() as stack:
            for mode in (fakes, fakes_have_storages(fakes), KnownValues()):
                stack.enter_context(mode)
            yield
    finally:
        are_we_tracing.__code__ = before
        dist.destroy_process_group()


class _FakesOfRank(FakeTensorMode):
    """Make fake tensors that wait for a collective only when they are read, as real ones."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.name() == "_c10d_functional::wait_tensor":
            return args[0]  # for which torch's fake kernel makes another tensor
        if func.name() == "_c10d_functional::_wrap_tensor_autograd":
            return private.functional_collectives().AsyncCollectiveTensor(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _no() -> bool:
    """Stand for torch's `_are_we_tracing`: these fakes are those of an eager step."""
    return False
