"""Ranks that train one model agree on its first plan: docs/ranks.md.

NOTE [ Where ranks meet ] A collective that one rank alone comes to is a hang. So ranks meet once, in the
first training forward of a model that is known to be run by all of them together: in DistributedDataParallel,
under `fully_shard`, or where the user named the group. Whatever comes later (a new shape, gradients that
exist, a correction) each rank plans by itself; policies that differ between ranks change no gradient and no
collective.

What ranks tell each other is JSON as bytes in a tensor. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ac_client.errors import RankFailed
from autoac.planner import Policy
from autoac.planner.errors import PlannerError, from_dict
from autoac.planner.formats.policy_set import Extent, Shape
from autoac.profiler import CannotProfile, NothingToProfile, ProfilerBusy, ShardsInUse, device_of

Group = Any
"""A `torch.distributed.ProcessGroup`; "auto": that of the model's wrapper; None: each rank for itself."""

AUTO: Final = "auto"


class Ranks:
    """The ranks of a group, of which this process is one. All of them have to come to each call.

    Args:
        group: the group.
        device: of this rank's model. What is told goes over it, if the group talks over devices of its type:
            the current one, which NCCL would take, may be the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        talks_over = torch.device(dist.distributed_c10d._get_object_coll_device(group))
        self._device = device if device.type == talks_over.type else talks_over

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank."""
        told = self._numbers(int(flag))
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        return bool(told.item())

    def all(self, text: str) -> list[str]:
        """What each rank says, by rank."""
        mine = text.encode()
        sizes = [self._numbers(0) for _ in range(self.size)]
        dist.all_gather(sizes, self._numbers(len(mine)), group=self._group)
        longest = max(int(size.item()) for size in sizes)
        told = [self._bytes(b"", longest) for _ in sizes]
        dist.all_gather(told, self._bytes(mine, longest), group=self._group)
        return [_text(one, int(size.item())) for one, size in zip(told, sizes, strict=True)]

    def of(self, speaker: int, text: str) -> str:
        """What rank `speaker` says; the others' `text` is not read."""
        mine = text.encode() if speaker == self.rank else b""
        size = self._numbers(len(mine))
        source = dist.get_global_rank(self._group, speaker)
        dist.broadcast(size, source, group=self._group)
        told = self._bytes(mine, int(size.item()))
        dist.broadcast(told, source, group=self._group)
        return _text(told, int(size.item()))

    def _numbers(self, number: int) -> Tensor:
        return torch.tensor([number], dtype=torch.int64, device=self._device)

    def _bytes(self, content: bytes, size: int) -> Tensor:
        told = torch.zeros(max(size, 1), dtype=torch.uint8)  # a collective may refuse no bytes at all
        if content:
            told[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return told.to(self._device)


def _text(told: Tensor, size: int) -> str:
    return bytes(told[:size].cpu().tolist()).decode()


def ranks_of(model: nn.Module, group: Group) -> Ranks | None:
    """The ranks that run each forward of `model` together; None if they are not known, or one alone.

    Args:
        model: whose forward may be running.
        group: as `apply` was given it; under `fully_shard` the ranks of the shards in place of "auto".
    """
    if group is None or not dist.is_available() or not dist.is_initialized():
        return None
    found = _wrapper_group(model) if group is AUTO else group
    if found is None or dist.get_rank(found) < 0 or dist.get_world_size(found) == 1:
        return None
    return Ranks(found, device_of(model))


def _wrapper_group(model: nn.Module) -> Any:
    active = DistributedDataParallel._get_active_ddp_module()
    for wrapper in (model, active):
        if isinstance(wrapper, DistributedDataParallel) and (
            wrapper is model or any(module is model for module in wrapper.modules())
        ):
            # Under Join a rank without batches comes to no forward.
            return None if wrapper._join_config.enable else wrapper.process_group
    return None


@dataclass(frozen=True, slots=True)
class Need:
    """What one rank found out about its first step. Bytes."""

    shape: Shape
    limit: int  # the budget less headroom
    static: int  # live over the whole step, inputs included


@dataclass(frozen=True, slots=True)
class Terms:
    """What the rank that plans has to keep, for all ranks. Bytes."""

    limit: int
    extra_static: int  # what the neediest rank holds beyond the one that plans


@dataclass(frozen=True, slots=True)
class Made:
    """A policy that one rank has made for all."""

    planner: int
    shape: Shape  # of the planner's batch
    policy: Policy


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know once they have met."""

    made: tuple[Made, ...]
    static: int  # bytes that the neediest rank holds over the whole step


def meet(ranks: Ranks, need: Need | Exception, plan: Callable[[Terms], Policy]) -> Agreed:
    """Policies for the first batches of all ranks, the same on each rank.

    One rank plans for all whose batches its own covers: the largest batch, and of equal ones the lowest rank.
    Only if no batch covers all the others are there more ranks that plan, at the same time.

    Args:
        ranks: all of them call this.
        need: what this rank needs, or what went wrong when it found out.
        plan: makes this rank's policy, if it is one that plans.

    Raises:
        Exception: what went wrong on one of the ranks, the first of them. On the others than that one a
            RankFailed if it is none of the planner's and profiler's own errors.
    """
    told = ranks.all(_words_of(need))
    _raise_first(ranks, list(enumerate(told)), need)
    needs = [_need(text) for text in told]
    limit = min(each.limit for each in needs)
    static = max(each.static for each in needs)
    mine: Policy | Exception | None = None
    planners = planners_of([each.shape for each in needs])
    if ranks.rank in planners:
        try:
            mine = plan(Terms(limit, static - needs[ranks.rank].static))
        except Exception as error:  # noqa: BLE001 - told to all ranks, and raised on each
            mine = error
    said = "" if mine is None else mine.to_json() if isinstance(mine, Policy) else _words_of(mine)
    made = [(planner, ranks.of(planner, said)) for planner in planners]
    _raise_first(ranks, made, mine)
    policies = (Made(planner, needs[planner].shape, Policy.from_json(text)) for planner, text in made)
    return Agreed(tuple(policies), static)


def planners_of(shapes: Sequence[Shape]) -> list[int]:
    """Ranks whose batches together cover all ranks' batches, the largest first.

    >>> planners_of([{"0": "float32[4, 8]"}, {"0": "float32[4, 9]"}, {"0": "float32[5, 1]"}])
    [1, 2]
    """
    extents = [Extent.of(shape) for shape in shapes]
    planners: list[int] = []
    for rank in sorted(range(len(extents)), key=lambda rank: (-extents[rank].elements, rank)):
        if not any(extents[planner].covers(extents[rank]) for planner in planners):
            planners.append(rank)
    return planners


# --- what is told ---------------------------------------------------------------------------------------

_FAILED: Literal["failed"] = "failed"


def _words_of(said: Need | Exception) -> str:
    if isinstance(said, Need):
        return json.dumps({"shape": dict(said.shape), "limit": said.limit, "static": said.static})
    data: dict[str, Any] = {_FAILED: type(said).__name__, "words": str(said)}
    match said:
        case PlannerError():
            data["error"] = said.to_dict()
        case CannotProfile():
            data["arguments"] = [said.where, said.why, said.instead]
        case ShardsInUse():
            data["arguments"] = [said.where]
    return json.dumps(data)


def _need(text: str) -> Need:
    data = json.loads(text)
    return Need(data["shape"], data["limit"], data["static"])


def _raise_first(ranks: Ranks, told: Sequence[tuple[int, str]], mine: Any) -> None:
    """Raise on every rank what the first that failed says."""
    for rank, text in told:
        data = json.loads(text)
        if _FAILED not in data:
            continue
        error = mine if rank == ranks.rank else _error(rank, data)
        error.add_note(f"autoac: that was on rank {rank} of {ranks.size}. No rank is planned.")
        raise error


def _error(rank: int, data: dict[str, Any]) -> Exception:
    """The error that another rank tells of: of the same type and in the same words, if it is one of ours."""
    if (error := from_dict(data.get("error", {}))) is not None:
        return error
    match data[_FAILED]:
        case "CannotProfile":
            return CannotProfile(*data["arguments"])
        case "NothingToProfile":
            return NothingToProfile(data["words"])
        case "ProfilerBusy":
            return ProfilerBusy()
        case "ShardsInUse":
            return ShardsInUse(*data["arguments"])
        case kind:
            return RankFailed(rank, kind, data["words"])
