"""Named small graphs, random graphs, and a Profile in the likeness of GPT-2."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from autoac.planner.formats.profile import (
    BackwardSteps,
    Environment,
    OpFlag,
    Ops,
    Outputs,
    Profile,
    Ragged,
    SavedTensors,
    StaticBytes,
    Storages,
    Temporaries,
    Values,
)
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import Graph
from autoac.planner.solver.bounds import bounds

MIB = 1 << 20


@dataclass
class Step:
    """A backward step of a `Tape`."""

    name: str
    unpacks: list[int]
    runtime_us: float
    other: int = 0
    peak: int = 0


@dataclass
class Tape:
    """Writes a Profile by hand, op by op."""

    model: str = "test"
    modules: list[str] = field(default_factory=list)
    overloads: list[str] = field(default_factory=list)
    op_module: list[int] = field(default_factory=list)
    op_overload: list[int] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    runtime: list[float] = field(default_factory=list)
    workspace: list[int] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    must: list[str] = field(default_factory=list)
    storage_nbytes: list[int] = field(default_factory=list)
    released: list[int | None] = field(default_factory=list)
    last_touch: list[int] = field(default_factory=list)
    value_storage: list[int] = field(default_factory=list)
    value_op: list[int] = field(default_factory=list)
    value_previous: list[int] = field(default_factory=list)
    newest: dict[int, int] = field(default_factory=dict)
    handles: list[tuple[int, int]] = field(default_factory=list)
    handle_dropped: dict[int, int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    static: int = 0
    gradients: int = 0

    def _intern(self, table: list[str], name: str) -> int:
        if name not in table:
            table.append(name)
        return table.index(name)

    def op(
        self,
        overload: str,
        reads: list[int],
        *nbytes: int,
        us: float = 1.0,
        module: str = "m",
        must: str = "",
        workspace: int = 0,
        other: int = 0,
        flags: int = 0,
        into: int | None = None,
    ) -> list[int]:
        """Run an op; returns the values it writes. `into`: a value that it writes over in place."""
        op = len(self.reads)
        self.op_module.append(self._intern(self.modules, module))
        self.op_overload.append(self._intern(self.overloads, overload))
        self.reads.append(list(reads))
        self.runtime.append(us)
        self.workspace.append(workspace)
        self.other.append(other)
        self.flags.append(flags)
        self.must.append(must)
        for v in [*reads, *([into] if into is not None else [])]:
            self.last_touch[self.value_storage[v]] = op
        written = []
        if into is not None:
            if into not in self.reads[-1]:
                self.reads[-1].append(into)
            written.append(self._value(self.value_storage[into], op))
        for size in nbytes:
            self.storage_nbytes.append(size)
            self.released.append(None)
            self.last_touch.append(op)
            written.append(self._value(len(self.storage_nbytes) - 1, op))
        return written

    def _value(self, storage: int, op: int) -> int:
        v = len(self.value_storage)
        self.value_storage.append(storage)
        self.value_op.append(op)
        self.value_previous.append(self.newest.get(storage, -1))
        self.newest[storage] = v
        return v

    def save(self, v: int) -> int:
        """Let autograd pack `v`; return the id of the saved tensor."""
        self.handles.append((v, len(self.reads)))
        return len(self.handles) - 1

    def step(self, name: str, unpacks: list[int], us: float = 1.0, other: int = 0, peak: int = 0) -> None:
        """Add a backward step that drops the tensors that it unpacks."""
        self.steps.append(Step(name, unpacks, us, other, max(peak, other)))
        for h in unpacks:
            self.handle_dropped[h] = len(self.steps)

    def profile(self) -> Profile:
        """Return the Profile. By default Python holds a storage until one op after its last use."""
        n = len(self.reads)
        reasons = list(dict.fromkeys(m for m in self.must if m))
        nodes = list(dict.fromkeys(s.name for s in self.steps))
        return Profile(
            model=self.model,
            inputs=("int64[1, 1]",),
            environment=Environment(
                torch="none",
                device_type="cuda",
                device_name="test",
                dtype="float32",
                autocast="off",
                allocator_rounding=1,
                threads=1,
                cudnn=0,
                ranks="1",
            ),
            static=StaticBytes(
                parameters=self.static, buffers=0, gradients=0, optimizer_state=0, inputs=0, workspaces=0
            ),
            gradient_nbytes=self.gradients,
            kept_nbytes=0,
            link=None,
            notes=(),
            forward_ends=(),
            pass_ends=(),
            waiting_microbatches=0,
            loss_begins=None,
            outputs=Outputs(position=(), storage=(), released=()),
            temporaries=no_temporaries(n + len(self.steps)),
            optimizer_workspace_nbytes=0,
            modules=tuple(self.modules),
            overloads=tuple(self.overloads),
            nodes=tuple(nodes),
            reasons=tuple(reasons),
            storages=Storages(
                nbytes=tuple(self.storage_nbytes),
                slack_nbytes=(0,) * len(self.storage_nbytes),
                released=tuple(
                    min(touched + 2, n) if at is None else at
                    for at, touched in zip(self.released, self.last_touch, strict=True)
                ),
            ),
            values=Values(
                storage=tuple(self.value_storage),
                op=tuple(self.value_op),
                previous=tuple(self.value_previous),
            ),
            ops=Ops(
                module=tuple(self.op_module),
                overload=tuple(self.op_overload),
                reads=Ragged.of(self.reads),
                runtime_us=tuple(self.runtime),
                spread_us=tuple(0.0 for _ in self.reads),
                flops=tuple(0 for _ in self.reads),
                workspace_nbytes=tuple(self.workspace),
                other_nbytes=tuple(self.other),
                flags=tuple(self.flags),
                must_save=tuple(reasons.index(m) if m else -1 for m in self.must),
            ),
            saved=SavedTensors(
                value=tuple(v for v, _ in self.handles),
                packed=tuple(p for _, p in self.handles),
                dropped=tuple(
                    n + self.handle_dropped.get(h, len(self.steps)) for h in range(len(self.handles))
                ),
                needed_until=(0,) * len(self.handles),
            ),
            backward=BackwardSteps(
                name=tuple(nodes.index(s.name) for s in self.steps),
                unpacks=Ragged.of([s.unpacks for s in self.steps]),
                runtime_us=tuple(s.runtime_us for s in self.steps),
                other_nbytes=tuple(s.other for s in self.steps),
                peak_nbytes=tuple(s.peak for s in self.steps),
            ),
        )


def no_temporaries(moments: int) -> Temporaries:
    """Return the table of a step that allocates nothing but storages of forward."""
    return Temporaries(nbytes=(), changes=Ragged.of([()] * moments))


def step_with_fragments() -> Profile:
    """Return a step on a GPU: an output of 8 MiB, in backward 3 MiB for a moment and a gradient of 12 MiB."""
    tape = Tape(static=12 * MIB, gradients=12 * MIB)
    (out,) = tape.op("aten.mm.default", [], 8 * MIB)
    tape.step("MmBackward0", [tape.save(out)], other=0, peak=15 * MIB)
    profile = tape.profile()
    static = profile.static.model_copy(update={"optimizer_state": 24 * MIB})
    temporaries = Temporaries(nbytes=(3 * MIB, 12 * MIB), changes=Ragged.of([[], [0, 1, 0]]))
    environment = profile.environment.model_copy(update={"device_type": "cuda"})
    return profile.model_copy(
        update={"static": static, "temporaries": temporaries, "environment": environment}
    )


def gpt2(
    layers: int = 12, *, batch: int = 4, length: int = 128, width: int = 768, vocabulary: int = 50257
) -> Profile:
    """Return a step of transformers' GPT-2 with dropout on a CPU, with run times from a roofline."""
    tape = Tape(model=f"gpt2-{layers}")
    heads, word = 12, 4
    tokens = batch * length
    h = tokens * width * word  # a hidden state
    a = batch * heads * length * length * word  # attention scores
    logits = tokens * vocabulary * word
    weights = 0

    def mm_us(m: int, k: int, n: int) -> float:
        return 2.0 * m * k * n / 150e3 + 20  # 150 GFLOP/s

    def ew_us(nbytes: int, cost: float = 1.0) -> float:
        return cost * nbytes / 4e3 + 5  # 4 GB/s

    # name, handles, us, size of grad, weight grad
    backward: list[tuple[str, list[int], float, int, int]] = []

    def dropout(module: str, v: int, size: int) -> int:
        (m0,) = tape.op("aten.empty_like.default", [v], size, us=2, module=module)
        (m1,) = tape.op(
            "aten.bernoulli_.float", [], us=ew_us(size, 8), module=module, into=m0, flags=int(OpFlag.RANDOM)
        )
        (m2,) = tape.op("aten.div_.Scalar", [], us=ew_us(size), module=module, into=m1)
        (out,) = tape.op("aten.mul.Tensor", [v, m2], size, us=ew_us(size), module=module)
        backward.append(("MulBackward0", [tape.save(m2)], ew_us(size), size, 0))
        return out

    def linear(module: str, v: int, k: int, n: int) -> int:
        nonlocal weights
        weights += (k + 1) * n * word
        (out,) = tape.op("aten.addmm.default", [v], tokens * n * word, us=mm_us(tokens, k, n), module=module)
        backward.append(
            ("AddmmBackward0", [tape.save(v)], 2 * mm_us(tokens, k, n), tokens * k * word, (k + 1) * n * word)
        )
        return out

    def norm(module: str, v: int) -> int:
        nonlocal weights
        weights += 2 * width * word
        sizes = h, tokens * word, tokens * word
        out, mean, rstd = tape.op(
            "aten.native_layer_norm.default", [v], *sizes, us=ew_us(h, 2), module=module
        )
        saved = [tape.save(v), tape.save(mean), tape.save(rstd)]
        backward.append(("NativeLayerNormBackward0", saved, ew_us(h, 3), h, 2 * width * word))
        return out

    def gelu(module: str, v: int, size: int) -> int:
        def ew(name: str, reads: list[int], cost: float = 1.0) -> int:
            return tape.op(name, reads, size, us=ew_us(size, cost), module=module)[0]

        half = ew("aten.mul.Tensor", [v])
        cube = ew("aten.pow.Tensor_Scalar", [v], 3)
        saved_cube = tape.save(v)
        small = ew("aten.mul.Tensor", [cube])
        inner = ew("aten.add.Tensor", [v, small])
        scaled = ew("aten.mul.Tensor", [inner])
        tanh = ew("aten.tanh.default", [scaled], 3)
        saved_tanh = tape.save(tanh)
        plus = ew("aten.add.Tensor", [tanh])
        out = ew("aten.mul.Tensor", [half, plus])
        saved_mul = [tape.save(half), tape.save(plus)]
        us = ew_us(size)
        backward.append(("MulBackward0 half", [], us, size, 0))
        backward.append(("PowBackward0", [saved_cube], us * 3, 3 * size, 0))
        backward.append(("TanhBackward0", [saved_tanh], us, 2 * size, 0))
        backward.append(("MulBackward0", saved_mul, us * 2, 2 * size, 0))
        return out

    weights += (vocabulary + 1024) * width * word
    (tok,) = tape.op("aten.embedding.default", [], h, us=ew_us(h), module="transformer.wte")
    (pos,) = tape.op("aten.embedding.default", [], length * width * word, us=5, module="transformer.wpe")
    (x,) = tape.op("aten.add.Tensor", [tok, pos], h, us=ew_us(h), module="transformer")
    x = dropout("transformer.drop", x, h)
    for i in range(layers):
        block = f"transformer.h.{i}"
        y = norm(f"{block}.ln_1", x)
        qkv = linear(f"{block}.attn.c_attn", y, width, 3 * width)
        attn = f"{block}.attn"
        (q,) = tape.op("aten.clone.default", [qkv], h, us=ew_us(h), module=attn)
        (k,) = tape.op("aten.clone.default", [qkv], h, us=ew_us(h), module=attn)
        (scores,) = tape.op("aten.bmm.default", [q, k], a, us=2 * mm_us(tokens, length, width), module=attn)
        saved_qk = [tape.save(q), tape.save(k)]
        backward.append(("BmmBackward0 qk", saved_qk, 4 * mm_us(tokens, length, width), 2 * h, 0))
        (scaled,) = tape.op("aten.div.Tensor", [scores], a, us=ew_us(a), module=attn)
        (masked,) = tape.op("aten.where.self", [scaled], a, us=ew_us(a), module=attn)
        (soft,) = tape.op("aten._softmax.default", [masked], a, us=ew_us(a, 3), module=attn)
        backward.append(("SoftmaxBackward0", [tape.save(soft)], ew_us(a, 2), a, 0))
        dropped = dropout(f"{attn}.attn_dropout", soft, a)
        (v,) = tape.op("aten.clone.default", [qkv], h, us=ew_us(h), module=attn)
        (mixed,) = tape.op("aten.bmm.default", [dropped, v], h, us=mm_us(tokens, length, width), module=attn)
        saved_av = [tape.save(dropped), tape.save(v)]
        backward.append(("BmmBackward0 av", saved_av, 2 * mm_us(tokens, length, width), a + h, 0))
        (merged,) = tape.op("aten.clone.default", [mixed], h, us=ew_us(h), module=attn)
        y = linear(f"{attn}.c_proj", merged, width, width)
        y = dropout(f"{attn}.resid_dropout", y, h)
        (x,) = tape.op("aten.add.Tensor", [y, x], h, us=ew_us(h), module=block)
        y = norm(f"{block}.ln_2", x)
        y = linear(f"{block}.mlp.c_fc", y, width, 4 * width)
        y = gelu(f"{block}.mlp.act", y, 4 * h)
        y = linear(f"{block}.mlp.c_proj", y, 4 * width, width)
        y = dropout(f"{block}.mlp.dropout", y, h)
        (x,) = tape.op("aten.add.Tensor", [x, y], h, us=ew_us(h), module=block)
    y = norm("transformer.ln_f", x)
    (out,) = tape.op("aten.mm.default", [y], logits, us=mm_us(tokens, width, vocabulary), module="lm_head")
    backward.append(
        ("MmBackward0", [tape.save(y)], 2 * mm_us(tokens, width, vocabulary), h, vocabulary * width * word)
    )
    (logp,) = tape.op("aten._log_softmax.default", [out], logits, us=ew_us(logits, 2), module="")
    tape.released[tape.value_storage[out]] = (
        len(tape.reads) + 1 + len(backward) + 2
    )  # the caller holds outputs
    backward.append(("LogSoftmaxBackward0", [tape.save(logp)], ew_us(logits, 2), logits, 0))
    tape.op("aten.nll_loss_forward.default", [logp], 64, 64, us=ew_us(h), module="")
    backward.append(("NllLossBackward0", [tape.save(logp)], ew_us(logits), logits, 0))

    tape.static, tape.gradients = weights, weights
    accumulated, flowing = 0, 0
    residual = h
    for name, handles, us, size, weight in reversed(backward):
        other = accumulated + flowing + residual
        tape.step(name, handles, us, other, other + size + weight)
        accumulated += weight
        flowing = size
    return tape.profile()


seeds = st.integers(0, 2**32 - 1)


def random_graph(seed: int, most_ops: int = 7) -> Graph:
    return build(random_profile(random.Random(seed), most_ops))


def random_profile(rng: random.Random, most_ops: int = 8) -> Profile:
    """Return a small step that exercises every rule of the schedule.

    Ops with several inputs and outputs, writes in place (over values that others still read, too), values
    that must be saved, storages that Python holds into backward, saved tensors that are never unpacked
    or dropped later than the step that unpacks them, or were packed before a write elsewhere in their
    storage, steps that unpack several, workspaces and gradients.

    Args:
        rng: what is drawn from.
        most_ops: how many ops there are at most.
    """
    tape = Tape(static=rng.randrange(3))
    n = rng.randint(2, most_ops)
    values: list[int] = []
    newest: dict[int, int] = {}  # storage -> value
    for _ in range(n):
        reads = sorted(rng.sample(values, min(len(values), rng.choice((0, 1, 1, 1, 2, 2, 3)))))
        into = None
        if newest and rng.random() < 0.2:
            into = rng.choice(sorted(newest.values()))
        sizes = [rng.randrange(10) for _ in range(rng.choice((1, 1, 1, 1, 2)))] if into is None else []
        written = tape.op(
            f"test.op{rng.randrange(3)}",
            reads,
            *sizes,
            us=rng.randrange(6),
            must="random" if rng.random() < 0.08 else "",
            workspace=rng.choice((0, 0, 0, 2, 5)),
            other=rng.choice((0, 0, 0, 1, 4)),
            into=into,
        )
        for v in written:
            newest[tape.value_storage[v]] = v
        values += written
        # Forward code usually reads the newest version of what it has; sometimes autograd kept an old one.
        if rng.random() < 0.8:
            values = [v for v in values if newest[tape.value_storage[v]] == v]
    handles = []
    for v in range(len(tape.value_storage)):
        for _ in range(rng.choice((0, 1, 1, 2))):
            handles.append(tape.save(v))
    order = sorted(handles, key=lambda h: -tape.handles[h][0] + rng.choice((0, 0, 0, 1.5, -1.5, 4)))
    steps: list[list[int]] = [[]]
    for h in order:
        if rng.random() < 0.05:
            continue  # never unpacked
        if rng.random() < 0.6:
            steps.append([])
        steps[-1].append(h)
    for unpacks in steps:
        other = rng.choice((0, 0, 2, 6))
        tape.step(f"step{rng.randrange(3)}", unpacks, other=other, peak=other + rng.choice((0, 0, 3)))
    for h, dropped in list(tape.handle_dropped.items()):
        if rng.random() < 0.2:
            tape.handle_dropped[h] = rng.randint(dropped, len(steps))
    for h in handles:
        if h not in tape.handle_dropped and rng.random() < 0.5:
            tape.handle_dropped[h] = rng.randint(-1, len(steps))
    end = n + len(steps)
    for s in range(len(tape.storage_nbytes)):
        if rng.random() < 0.2:
            tape.released[s] = rng.randint(tape.last_touch[s] + 1, end)
    tape.gradients = rng.choice((0, 0, 4))
    for h, (v, _) in enumerate(tape.handles):  # of an older version, where nothing was written since
        while tape.value_previous[v] >= 0 and rng.random() < 0.3:
            tape.handles[h] = (tape.handles[h][0], tape.value_op[v])
            v = tape.value_previous[v]
    return tape.profile()


def resized(graph: Graph, rng: random.Random) -> Graph:
    """Return `graph` with some storages empty, others twice as large, and run times far apart."""
    factors = [rng.choice((0, 1, 1, 2)) for _ in graph.storages]
    return replace(
        graph,
        storages=tuple(
            replace(storage, nbytes=storage.nbytes * factor)
            for storage, factor in zip(graph.storages, factors, strict=True)
        ),
        ops=tuple(replace(op, runtime_us=float(rng.choice((1, 2, 5, 20)))) for op in graph.ops),
    )


def greedy_trap() -> Profile:
    """Return a step for which the greedy choice, the least time per byte first, misses the best plan.

        a (6 bytes, 3 us)    b (5 bytes, 2 us)    c (5 bytes, 2 us)    each read by backward only

    Save-all peaks at 16. Within 10 bytes greedy drops b (2.5 bytes for a microsecond), then c (the same),
    and since c, run again, meets a, it drops a as well and pays 7 us. Dropping a alone is enough: 3 us.
    """
    tape = Tape()
    saved = []
    for name, nbytes, us in (("a", 6, 3.0), ("b", 5, 2.0), ("c", 5, 2.0)):
        (v,) = tape.op(name, [], nbytes, us=us)
        saved.append(tape.save(v))
        tape.released[v] = v + 1
    tape.op("loss", [], 0, us=0.0)
    tape.step("loss", [], peak=0)
    for h in reversed(saved):
        tape.step("step", [h])
    return tape.profile()


def dropout() -> Profile:
    """Dropout on a CPU: `x -> empty_like -> bernoulli_ -> div_`, times x; backward reads the mask."""
    tape = Tape()
    (x,) = tape.op("x", [], 10, us=5)
    (m0,) = tape.op("empty_like", [x], 10, us=1)
    (m1,) = tape.op("bernoulli_", [], us=2, into=m0)
    (m2,) = tape.op("div_", [], us=1, into=m1)
    tape.op("mul", [x, m2], 10, us=1)
    mask = tape.save(m2)
    tape.op("loss", [], 0, us=0)
    tape.step("loss", [], peak=20)
    tape.step("MulBackward0", [mask], other=10)
    return tape.profile()


def chunks() -> Profile:
    """Two in-place ops on halves of one storage, each with a saved tensor of its half."""
    tape = Tape()
    (x,) = tape.op("x", [], 8)
    (left,) = tape.op("sigmoid_", [], into=x)
    first = tape.save(left)
    (both,) = tape.op("tanh_", [], into=left)
    tape.handles[first] = (both, tape.handles[first][1])  # read off the newest version, packed before it
    second = tape.save(both)
    tape.op("loss", [], 0)
    tape.step("second", [second])
    tape.step("first", [first])
    return tape.profile()


def recurrent(steps: int) -> Profile:
    """Return a step like that of an LSTM: everything in it depends on all that came before.

    Each time step makes four gates of the last output h, a new cell of the last cell and three gates, and an
    output of the new cell and the fourth gate. Backward reads the gates, the cells and the outputs.
    """
    tape = Tape()
    (h,) = tape.op("h", [], 1)
    (cell,) = tape.op("cell", [], 1)
    packed = []
    for _ in range(steps):
        (product,) = tape.op("mm", [h], 4, us=12)
        gates = [tape.op("sigmoid", [product], 1)[0] for _ in range(4)]
        of_mm, of_cell = [tape.save(h)], [tape.save(v) for v in (cell, *gates[:3])]
        (cell,) = tape.op("cell", [cell, *gates[:3]], 1, us=3)
        (bent,) = tape.op("tanh", [cell], 1)
        (h,) = tape.op("mul", [bent, gates[3]], 1)
        packed.append((of_mm, of_cell, [tape.save(bent), tape.save(gates[3])]))
    tape.op("loss", [h], 0, us=0)
    for of_mm, of_cell, of_mul in reversed(packed):
        tape.step("mul", of_mul, us=2, other=2)
        tape.step("cell", of_cell, us=4, other=3)
        tape.step("mm", of_mm, us=24, other=4)
    return tape.profile()


def between(found: Profile | Graph, share: float = 0.5) -> int:
    """Return the budget at `share` of the way from the bound below all peaks to saving everything."""
    known = bounds(build(found) if isinstance(found, Profile) else found)
    return int(known.floor + share * (known.ceiling - known.floor))


def chain_tape(*nbytes: int, runtime_us: Sequence[float] | None = None, static_bytes: int = 0) -> Tape:
    """Return a chain of ops, the simplest example of a step.

    Op `i` allocates `nbytes[i]` and reads op `i - 1`. Python holds an output until the next op has run.
    Backward goes from the last op to the first. Its step `j` unpacks the output of op `n - 1 - j`, then drops
    the saved tensor.
    """
    tape, values, saved = Tape(static=static_bytes), list[int](), list[int]()
    times = runtime_us if runtime_us is not None else [1.0] * len(nbytes)
    for size, us in zip(nbytes, times, strict=True):
        values += tape.op("test.op", values[-1:], size, us=us)
        saved.append(tape.save(values[-1]))
    tape.released = [min(i + 2, len(nbytes)) for i in values]
    for h in reversed(saved):
        tape.step("step", [h])
    return tape


def chain(*nbytes: int, runtime_us: Sequence[float] | None = None, static_bytes: int = 0) -> Graph:
    """Return the graph of a chain of ops."""
    return build(chain_tape(*nbytes, runtime_us=runtime_us, static_bytes=static_bytes).profile())
