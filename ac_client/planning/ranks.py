"""Agree with the other ranks of a training on the first plan: docs/integrations.md.

NOTE [ Where ranks meet ] A collective entered by only one rank deadlocks. So ranks meet once, when the second
training forward begins of a model that is known to be run by all together: in DistributedDataParallel, under
`fully_shard`, because the user named the group, or because of NOTE [ Ranks of collectives ]. Later plans (for
a new shape, for gradients that exist, for a correction) are made by each rank alone; policies that differ
between ranks change no gradient and no collective.

NOTE [ Recomputes that communicate ] With `save_collectives=False`, a backward repeats functional
collectives, each when it is needed. That is at the same moment on all ranks only if they carry out one policy
over the same ops. So only a plan of a meeting in which all ranks have shown the same step may do this, and
only if the ranks that meet include all those that the step communicates with. The plan stays: no rank plans
this step again by itself, and a forward that leaves the policy raises. Plans that a rank makes alone (for a
new shape, which all ranks of a tensor-parallel group have at once) save collectives.

Ranks send each other JSON, as bytes in a tensor. Nothing is pickled.

NOTE [ Ranks of collectives ] Under tensor, expert and context parallelism no wrapper names the ranks. But a
observed forward communicates as every forward does, and all ranks of a collective's group enter it. So they
all observe the same step, and can meet when the next one begins.

A group inside of another one does not count. All members of a group agree on that, because they all enter the
collectives of the larger one. If only this group counts on each of its members, the members meet in it. On a
mesh of two dimensions, several groups count on one rank, and no group is known that has all ranks. Such a
rank says so in each of its groups, and all their members plan alone. Each rank goes through its groups in the
order of the ranks in them, so that no two ranks wait for each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ac_client.errors import RankFailed, RankMissing
from autoac.planner import Policy, Profile
from autoac.planner.errors import PlannerError, from_dict
from autoac.planner.formats.policy_set import Extent, Shape
from autoac.profiler import CannotProfile, NothingToProfile, device_of
from autoac.tape.distributed.ddp import build_replicating, replicating
from autoac.tape.distributed.fsdp import mesh_groups_of
from autoac.tape.distributed.process_groups import Groups
from autoac.tape.torch_facts import private

Group = Any
"""A `torch.distributed.ProcessGroup`; "auto" for that of the model's wrapper; None: each rank plans alone."""

AUTO: Final = "auto"


_meetings: dict[tuple[int, ...], int] = {}  # how often these ranks have met: all count alike


class Ranks:
    """The ranks of a process group, or of a mesh, that this process is in. Every rank must make every call.

    On a mesh, messages go along one dimension after the other. Ranks are numbered by their coordinates.

    Args:
        groups: the process group, or that of each dimension of the mesh, the innermost first.
        device: the device of this rank's model. Messages are tensors on it if the group communicates over
            devices of its type. NCCL would take the current device, which may be the same on all ranks.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._groups = groups
        self.rank, self.size = 0, 1
        for group in groups:
            self.rank += dist.get_rank(group) * self.size
            self.size *= dist.get_world_size(group)
        self._all_here = False
        backend = private.device_of_group(groups[0])
        self._device = device if device.type == backend.type else backend

    def include(self, groups: Groups) -> bool:
        """Return True if all ranks of `groups` are known to be among these."""
        own = [set(dist.get_process_group_ranks(group)) for group in self._groups]
        every = self.size == dist.get_world_size()
        return every or all(any(set(ranks) <= mine for mine in own) for ranks in groups)

    def any(self, flag: bool) -> bool:
        """Return True if `flag` is true on any rank."""
        self._wait_for_all()
        flags = self._numbers(int(flag))
        for group in self._groups:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        return bool(flags.item())

    def gather(self, text: str) -> list[str]:
        """Return the `text` of each rank, by rank."""
        self._wait_for_all()
        texts = [text]
        for group in self._groups:
            mine = json.dumps(texts).encode()
            sizes = [self._numbers(0) for _ in range(dist.get_world_size(group))]
            dist.all_gather(sizes, self._numbers(len(mine)), group=group)
            longest = max(int(size.item()) for size in sizes)
            received = [self._bytes(b"", longest) for _ in sizes]
            dist.all_gather(received, self._bytes(mine, longest), group=group)
            found = (_text(one, int(size.item())) for one, size in zip(received, sizes, strict=True))
            texts = [each for one in found for each in json.loads(one)]
        return texts

    def _wait_for_all(self) -> None:
        """Wait until every rank is here, once, by the store of the job; it needs no collective.

        A rank that enters a collective alone may meet another collective, of the training. Gloo then ends the
        process without a word.

        Raises:
            RankMissing: one is not here within the store's timeout.
        """
        if self._all_here:
            return
        store = private.default_store()
        for group in self._groups:
            if dist.get_backend(group) == "fake":  # whose other ranks may not exist
                continue
            ranks = dist.get_process_group_ranks(group)
            number = _meetings[tuple(ranks)] = _meetings.get(tuple(ranks), 0) + 1
            keys = {rank: f"autoac/{'-'.join(map(str, ranks))}/{number}/{rank}" for rank in ranks}
            store.set(keys[dist.get_rank()], "here")
            try:
                store.wait(list(keys.values()), store.timeout)
            except RuntimeError as error:
                missing = [rank for rank, key in keys.items() if not store.check([key])]
                raise RankMissing(missing, store.timeout.total_seconds()) from error
        self._all_here = True

    def broadcast(self, sender: int, text: str) -> str:
        """Return the `text` of rank `sender`. The texts of other ranks are not sent."""
        text = text if sender == self.rank else ""
        for group in self._groups:
            sender, coordinate = divmod(sender, dist.get_world_size(group))
            source = dist.get_global_rank(group, coordinate)
            mine = text.encode() if dist.get_rank(group) == coordinate else b""
            size = self._numbers(len(mine))
            dist.broadcast(size, source, group=group)
            received = self._bytes(mine, int(size.item()))
            dist.broadcast(received, source, group=group)
            text = _text(received, int(size.item()))
        return text

    def _numbers(self, number: int) -> Tensor:
        return torch.tensor([number], dtype=torch.int64, device=self._device)

    def _bytes(self, content: bytes, size: int) -> Tensor:
        padded = torch.zeros(max(size, 1), dtype=torch.uint8)  # some collectives refuse an empty tensor
        if content:
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return padded.to(self._device)


def _text(received: Tensor, size: int) -> str:
    return bytes(received[:size].cpu().tolist()).decode()


def ranks_of(model: nn.Module, group: Group) -> Ranks | None:
    """Return the ranks that run each forward of `model` together; None if they are unknown, or only one.

    Args:
        model: the model, whose forward may be running.
        group: as passed to `apply`.
    """
    if group is None or not dist.is_available() or not dist.is_initialized():
        return None
    resolved = (mesh_groups_of(model) or _wrapper_groups(model)) if group is AUTO else [group]
    groups = [one for one in resolved if dist.get_rank(one) >= 0 and dist.get_world_size(one) > 1]
    return Ranks(groups, device_of(model)) if groups else None


def has_other_ranks() -> bool:
    """Return True if there are several ranks in this job."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def others_wait() -> bool:
    """Return True if there are other ranks in this job, which a collective of this one waits for."""
    return has_other_ranks() and dist.get_backend() != "fake"


def ranks_of_collectives(groups: Groups, model: nn.Module) -> tuple[Ranks | None, str]:
    """Return the ranks that run each forward together, and a reason if they are not known.

    Every rank must call this after its profile. See NOTE [ Ranks of collectives ].

    Args:
        groups: those of the collectives of a profiled forward.
        model: whose forward it is.
    """
    largest = sorted(
        ranks for ranks in groups if len(ranks) > 1 and not any(set(ranks) < set(other) for other in groups)
    )
    if not largest:
        return None, "" if not groups else "it communicates with no other rank"
    device = device_of(model)
    all_ranks = [Ranks([groups[ranks]], device) for ranks in largest]
    several = [ranks.any(len(largest) > 1) for ranks in all_ranks]
    if any(several):
        words = ", ".join(str(list(ranks)) for ranks in largest)
        return None, f"collectives of its forward, here over the ranks {words}, are over groups that overlap"
    return all_ranks[0], ""


def _wrapper_groups(model: nn.Module) -> list[Any]:
    active = DistributedDataParallel._get_active_ddp_module()
    for wrapper in (model, active):
        if isinstance(wrapper, DistributedDataParallel) and (
            wrapper is model or any(module is model for module in wrapper.modules())
        ):
            # Under Join a rank without batches runs no forward.
            return [] if wrapper._join_config.enable else [wrapper.process_group]
    build_replicating(model)
    replicated = replicating(model).get(model)
    return [] if replicated is None else [replicated.process_group]


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that one rank has and needs for its first step, in bytes."""

    shape: Shape
    limit: int  # the budget less headroom
    static: int  # live over the whole step, inputs included
    step: str = ""  # `digest_of` its profile; "" if it communicates with ranks that do not meet


@dataclass(frozen=True, slots=True)
class SharedPolicy:
    """A policy that one rank has planned and sent to all others."""

    planner: int  # the rank
    shape: Shape  # of the planner's batch
    policy: Policy


def digest_of(profile: Profile) -> str:
    """Return a digest of what a step runs and unpacks, in order: if equal, one policy recomputes alike."""
    parts = profile.keys(), profile.ops.reads, profile.values, profile.saved.value, profile.backward.unpacks
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def meet(
    ranks: Ranks, need: Need | Exception, plan: Callable[[int, int, bool], Policy]
) -> tuple[list[SharedPolicy], int]:
    """Return policies for the first batches of all ranks, the same on each rank, and static bytes.

    These are what the neediest rank holds over the whole step.

    The rank with the largest batch plans for all ranks whose batches its own batch covers; of several largest
    batches, the lowest rank. If batches are left, further ranks plan for these, at the same time.

    Args:
        ranks: all of them, each of which calls this.
        need: what this rank needs, or the error that kept it from finding out.
        plan: makes this rank's policy, if this rank plans: for a limit that has to fit on every rank, and the
            bytes that the neediest rank holds beyond what this one holds; with True if all run the same step.

    Raises:
        Exception: the first error of any rank. If it is not an error of the planner or the profiler, the
            other ranks raise RankFailed.
    """
    messages = ranks.gather(_encode(need))
    _raise_first(ranks, list(enumerate(messages)), need)
    needs = [Need(**json.loads(text)) for text in messages]
    limit = min(each.limit for each in needs)
    static = max(each.static for each in needs)
    first = needs[0]
    alike = first.step != "" and all((each.shape, each.step) == (first.shape, first.step) for each in needs)
    mine: Policy | Exception | None = None
    planners = planners_of([each.shape for each in needs])
    if ranks.rank in planners:
        try:
            mine = plan(limit, static - needs[ranks.rank].static, alike)
        except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised on each
            mine = error
    message = "" if mine is None else mine.to_json() if isinstance(mine, Policy) else _encode(mine)
    made = [(planner, ranks.broadcast(planner, message)) for planner in planners]
    _raise_first(ranks, made, mine)
    policies = [SharedPolicy(planner, needs[planner].shape, Policy.from_json(text)) for planner, text in made]
    return policies, static


def planners_of(shapes: Sequence[Shape]) -> list[int]:
    """Return ranks whose batches together cover the batches of all ranks, the largest first.

    >>> planners_of([{"0": "float32[4, 8]"}, {"0": "float32[4, 9]"}, {"0": "float32[5, 1]"}])
    [1, 2]
    """
    extents = [Extent.of(shape) for shape in shapes]
    planners: list[int] = []
    for rank in sorted(range(len(extents)), key=lambda rank: (-extents[rank].elements, rank)):
        if not any(extents[planner].covers(extents[rank]) for planner in planners):
            planners.append(rank)
    return planners


# --- messages ---------------------------------------------------------------------------------------------


def _encode(need: Need | Exception) -> str:
    if isinstance(need, Need):
        return json.dumps({**asdict(need), "shape": dict(need.shape)})
    data: dict[str, Any] = {"failed": type(need).__name__, "message": str(need)}
    match need:
        case PlannerError():
            data["error"] = need.to_dict()
        case CannotProfile():
            data["arguments"] = [need.where, need.why, need.instead]
    return json.dumps(data, default=str)


def _raise_first(ranks: Ranks, messages: Sequence[tuple[int, str]], mine: Any) -> None:
    """Raise on every rank the first error among the messages."""
    for rank, text in messages:
        data = json.loads(text)
        if "failed" not in data:
            continue
        error = mine if rank == ranks.rank else _decode_error(rank, data)
        error.add_note(f"autoac: rank {rank} of {ranks.size} raised this error. No rank is planned.")
        raise error


def _decode_error(rank: int, data: dict[str, Any]) -> Exception:
    """Return the error of another rank; a RankFailed if it is not one of the planner or the profiler."""
    if (error := from_dict(data.get("error", {}))) is not None:
        return error
    match data["failed"]:
        case "CannotProfile":
            return CannotProfile(*data["arguments"])
        case "NothingToProfile":
            return NothingToProfile(data["message"])
        case kind:
            return RankFailed(rank, kind, data["message"])
