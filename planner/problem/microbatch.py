"""Cut one microbatch out of the profile of several forwards, each of which has a backward of its own.

A loop may run further forwards before the backward of the first one: a stage of a pipeline, or a list of
outputs that is differentiated one by one. The record then has several forwards and the backward of one. The
others only wait, so their decisions would be free for a plan: nothing in the record reads what they saved. In
the loop each of them has such a backward. So the plan is one for a single forward, while the others wait with
what it saves (`Graph.waiting_microbatches`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import sub
from typing import TypeVar

from autoac.planner.formats.profile import Profile, Ragged, Table, Temporaries

T = TypeVar("T", bound=Table)


def microbatch_of(profile: Profile, *, counted: int = 0) -> Profile:
    """Return the profile of the one forward that backward has reached, while the other forwards wait.

    Gradients exist before its step, since all microbatches add to the same ones. A backward step frees what
    it makes for a gradient that exists.

    Args:
        profile: of several forwards and one backward.
        counted: bytes of gradients that count elsewhere.

    Returns:
        `profile` itself if no forward waits. If the one cannot be cut out (backward has reached several, or
        another forward writes over its storages), the same with all ops of those that wait saved.
    """
    ends, saved, n = profile.forward_ends, profile.saved, len(profile.ops)
    if len(ends) < 2:
        return profile
    spans = [range(a, b) for a, b in itertools.pairwise((0, *ends))]
    forward_of = [bisect_left(ends, packed) for packed in saved.packed]  # len(ends): of the loss
    reached = {forward_of[h] for h in profile.backward.unpacks.items} - {len(ends)}
    end = n + len(profile.backward)
    held = {forward for forward, dropped in zip(forward_of, saved.dropped, strict=True) if dropped == end}
    waiting = held - reached - {len(ends)}
    if not waiting:
        return profile
    alone = None
    if len(reached) == 1:
        (forward,) = reached
        kept = [h for h, f in enumerate(forward_of) if f in (forward, len(ends))]
        alone = _cut(profile, spans, forward, kept)
    if alone is None:
        return _with_saved(profile, itertools.chain.from_iterable(spans[other] for other in waiting))
    # As many as hold the bytes of those that wait, some of which may be of other sizes.
    nbytes = sum(_nbytes(profile, spans[other]) for other in waiting)
    number = -(-nbytes // max(1, _nbytes(profile, spans[forward])))
    return with_gradients(alone.model_copy(update={"waiting_microbatches": number}), counted)


def _with_saved(profile: Profile, ops: Iterable[int]) -> Profile:
    """Return the profile in which these ops must be saved."""
    must_save = list(profile.ops.must_save)
    for op in ops:
        must_save[op] = len(profile.reasons)
    return profile.model_copy(
        update={
            "reasons": (*profile.reasons, "no backward of its forward was seen"),
            "ops": profile.ops.model_copy(update={"must_save": tuple(must_save)}),
        }
    )


def _nbytes(profile: Profile, ops: range) -> int:
    """Return the bytes that these ops allocate."""
    values = profile.values
    rows = zip(values.op, values.storage, values.previous, strict=True)
    return sum(
        profile.storages.nbytes[storage] for op, storage, previous in rows if op in ops and previous < 0
    )


def _cut(profile: Profile, spans: Sequence[range], forward: int, saved: Sequence[int]) -> Profile | None:
    """Return the profile of one forward; None if another forward writes over one of its storages.

    What the forward reads of other forwards is like a batch: it exists before.

    Args:
        profile: of all forwards.
        spans: the ops of each forward.
        forward: which one to keep.
        saved: the saved tensors that it packed.
    """
    span, n, values = spans[forward], len(profile.ops), profile.values
    ops = [*span, *range(spans[-1].stop, n)]  # with the loss
    op_at = {op: i for i, op in enumerate(ops)}
    value_at = {v: i for i, v in enumerate(v for v, op in enumerate(values.op) if op in op_at)}
    storage_at = {s: i for i, s in enumerate(dict.fromkeys(values.storage[v] for v in value_at))}
    if any(values.storage[v] in storage_at for v in range(len(values)) if v not in value_at):
        return None
    saved = [h for h in saved if profile.saved.value[h] in value_at]
    saved_at = {h: i for i, h in enumerate(saved)}
    reads, unpacks = profile.ops.reads.rows(), profile.backward.unpacks.rows()

    def moments(column: Sequence[int], kept: Iterable[int]) -> tuple[int, ...]:
        """Return moments of the record as moments of one forward and backward."""
        return tuple(bisect_left(ops, column[i]) + max(column[i] - n, 0) for i in kept)

    # The last forward runs while all others wait, with what they hold outside of storages.
    other = profile.ops.other_nbytes
    alike = [one for one in spans if len(one) == len(span)]
    held = [max(other[one[i]] for one in alike) for i in range(len(span))]
    outputs = [i for i, storage in enumerate(profile.outputs.storage) if storage in storage_at]
    return profile.model_copy(
        update={
            "forward_ends": (),
            "loss_begins": len(span) if len(ops) > len(span) else None,
            "ops": _rows(
                profile.ops,
                ops,
                reads=Ragged.of([[value_at[v] for v in reads[op] if v in value_at] for op in ops]),
                other_nbytes=(*held, *other[spans[-1].stop :]),
            ),
            "storages": _rows(
                profile.storages, storage_at, released=moments(profile.storages.released, storage_at)
            ),
            "values": _rows(
                values,
                value_at,
                storage=tuple(storage_at[values.storage[v]] for v in value_at),
                op=tuple(op_at[values.op[v]] for v in value_at),
                previous=tuple(value_at.get(values.previous[v], -1) for v in value_at),
            ),
            "saved": _rows(
                profile.saved,
                saved,
                value=tuple(value_at[profile.saved.value[h]] for h in saved),
                packed=moments(profile.saved.packed, saved),
                dropped=moments(profile.saved.dropped, saved),
                needed_until=moments(profile.saved.needed_until, saved),
            ),
            "outputs": _rows(
                profile.outputs,
                outputs,
                storage=tuple(storage_at[profile.outputs.storage[i]] for i in outputs),
                released=moments(profile.outputs.released, outputs),
            ),
            "backward": profile.backward.model_copy(
                update={
                    "unpacks": Ragged.of([[saved_at[h] for h in row if h in saved_at] for row in unpacks])
                }
            ),
            "temporaries": _temporaries(profile.temporaries, spans, forward),
        }
    )


def _rows(table: T, kept: Iterable[int], **columns: object) -> T:
    """Return the table of some rows, in which `columns` are given."""
    own = {name: tuple(column[i] for i in kept) for name, column in table if name not in columns}
    return type(table)(**own, **columns)


def _temporaries(temporaries: Temporaries, spans: Sequence[range], forward: int) -> Temporaries:
    """Return the temporaries without those that live in other forwards alone.

    What other forwards allocate before the one that is kept, and do not free, is allocated as it begins; what
    they do after it happens in its last op.
    """
    rows, span, last = temporaries.changes.rows(), spans[forward], spans[-1].stop
    kept = [list(row) for row in (*rows[span.start : span.stop], *rows[last:])]
    kept[0][:0] = _once(rows[: span.start])
    kept[len(span) - 1] += _once(rows[span.stop : last])
    index = {block: i for i, block in enumerate(dict.fromkeys(itertools.chain.from_iterable(kept)))}
    return Temporaries(
        nbytes=tuple(temporaries.nbytes[block] for block in index),
        changes=Ragged.of([[index[block] for block in row] for row in kept]),
    )


def _once(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the blocks that these rows allocate or free, but not both."""
    times = Counter(itertools.chain.from_iterable(rows))
    return [block for block in times if times[block] == 1]


def with_gradients(profile: Profile, counted: int = 0) -> Profile:
    """Return the profile of a step that finds the gradients which the recorded one makes.

    Args:
        profile: of one forward and backward.
        counted: bytes of gradients that count elsewhere.

    What is left in `gradient_nbytes` outlives backward, but no backward step makes it.
    """
    n, blocks, outlive = len(profile.ops), profile.temporaries, profile.gradient_nbytes
    rows, made = blocks.changes.rows(), profile.blocks_that_outlive_backward()
    nbytes = [sum(blocks.nbytes[block] for block in row) for row in made]
    total = min(sum(nbytes), outlive)  # else forward has made some, such as units that stay gathered
    # A loss that stays is made before the gradients, and is none of them.
    others = sum(nbytes) - total
    before = [max(0, so_far - others) for so_far in itertools.accumulate(nbytes[:-1], initial=0)]
    backward = profile.backward
    columns = {
        name: tuple(map(sub, getattr(backward, name), before)) for name in ("other_nbytes", "peak_nbytes")
    }
    static, existing = profile.static, max(0, total - counted)
    freed = [[*row, *made[i - n]] if i >= n else row for i, row in enumerate(rows)]
    return profile.model_copy(
        update={
            "gradient_nbytes": outlive - total,
            "static": static.model_copy(update={"gradients": static.gradients + existing}),
            "backward": backward.model_copy(update=columns) if blocks else backward,
            "temporaries": blocks.model_copy(update={"changes": Ragged.of(freed)}),
        }
    )
