"""Training loops as people write them, each on a small model.

A loop is a function of an Env. It makes its model, has `env.plan` plan it, and runs each step inside
`env.step()`. Models are small, but activations are most of their memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

WIDTH, ROWS, TOKENS, VOCABULARY = 64, 128, 64, 512


class Env(Protocol):
    """Offer what a loop needs of the study."""

    device: str

    def plan(self, model: nn.Module, optimizer: Any = None, others: Iterable[nn.Module] = ()) -> None:
        """Have the model planned, if this run is planned. `others` are on the device, too."""

    def step(self) -> AbstractContextManager[None]:
        """Surround one step."""

    def steps(self) -> range: ...

    def keep(self, *modules: nn.Module) -> None:
        """Compare the weights and buffers of these modules at the end."""

    def note(self, *modules: nn.Module) -> None:
        """Compare the weights, buffers and gradients of these modules, as they are now."""


Loop = Callable[[Env], None]

LOOPS: dict[str, Loop] = {}


LARGE = ("large vocabulary",)  # that run only if they are named
BEGINS: dict[str, int] = {}  # loops of another form at first: the step from which they repeat


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__.replace("_", " ")] = function
    return function


def repeats_from(step: int) -> Callable[[Loop], Loop]:
    def note(function: Loop) -> Loop:
        BEGINS[function.__name__.replace("_", " ")] = step
        return loop(function)

    return note


# --- models and batches -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


def mlp(blocks: int = 4, out: int = 8, drop: float = 0.0) -> nn.Sequential:
    return nn.Sequential(*(Block(drop) for _ in range(blocks)), nn.Linear(WIDTH, out))


class LanguageModel(nn.Module):
    """Attention and MLP blocks over tokens; returns logits, or the loss too."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(blocks)
        )
        self.blocks = nn.ModuleList(Block(0.1) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids)
        for attention, block in zip(self.attention, self.blocks, strict=True):
            x = block(x + attention(x, x, x, need_weights=False)[0])
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def rows(env: Env, seed: int, n: int = ROWS) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, WIDTH, generator=chance), torch.randint(8, (n,), generator=chance)
    return x.to(env.device), y.to(env.device)


def tokens(env: Env, seed: int, n: int = TOKENS) -> Tensor:
    return torch.randint(VOCABULARY, (4, n), generator=torch.Generator().manual_seed(seed)).to(env.device)


def log_likelihood(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids)["logits"]
    return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1).sum(-1)


def planned(env: Env, model: nn.Module) -> AdamW:
    """Move the model to the device and have it planned; return its optimizer."""
    model.to(env.device)
    optimizer = AdamW(model.parameters())
    env.plan(model)
    env.keep(model)
    return optimizer


# --- loops --------------------------------------------------------------------------------------------------


@loop
def readme(env: Env) -> None:
    model = LanguageModel()
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            ids = tokens(env, i)
            loss = model(ids, labels=ids)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def large_vocabulary(env: Env) -> None:
    """Train a GPT-2 of 8 layers on a vocabulary whose logits are half of the step's memory."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=384, n_head=6, use_cache=False))
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            chance = torch.Generator().manual_seed(i)
            ids = torch.randint(model.config.vocab_size, (4, 256), generator=chance).to(env.device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def logits_in_the_loop(env: Env) -> None:
    model = mlp().to(env.device)
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    env.plan(model)
    env.keep(model)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i)
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            (logits.argmax(-1) == y).float().mean().item()


@loop
def accumulation(env: Env) -> None:
    model = mlp()
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            for part in range(3):
                x, y = rows(env, 3 * i + part)
                (F.cross_entropy(model(x), y) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def grad_scaler_and_autocast(env: Env) -> None:
    model = mlp(drop=0.1).to(env.device)
    optimizer = AdamW(model.parameters())
    kind = torch.device(env.device).type
    scaler = torch.amp.GradScaler(kind, init_scale=256.0)
    env.plan(model)
    env.keep(model)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i)
            with torch.autocast(kind, torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@loop
def clipping_and_schedule(env: Env) -> None:
    model = mlp().to(env.device)
    optimizer = AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    env.plan(model)
    env.keep(model)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i)
            F.cross_entropy(model(x), y).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=False)


@loop
def moving_average(env: Env) -> None:
    model = mlp().to(env.device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = AdamW(model.parameters())
    env.plan(model, others=[average])
    env.keep(model, average)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)


@loop
def evaluation_in_between(env: Env) -> None:
    model = mlp(drop=0.1)
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                F.cross_entropy(model(rows(env, 100)[0]), y).item()
            model.train()


@loop
def unfreezing(env: Env) -> None:
    model = mlp().to(env.device)
    for parameter in model[:2].parameters():
        parameter.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=1e-2)
    env.plan(model)
    env.keep(model)
    for i in env.steps():
        if i == 2:
            model.requires_grad_(True)
        with env.step():
            x, y = rows(env, i)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank part."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


@loop
def low_rank_adapters(env: Env) -> None:
    model = LanguageModel().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[arg-type]
    model.to(env.device)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
    env.plan(model)
    env.keep(model)
    for i in env.steps():
        with env.step():
            ids = tokens(env, i)
            model(ids, labels=ids)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def gan(env: Env) -> None:
    maker, critic = mlp(out=WIDTH).to(env.device), mlp(out=1).to(env.device)
    for_maker, for_critic = AdamW(maker.parameters()), AdamW(critic.parameters())
    env.plan(maker)
    env.plan(critic)
    env.keep(maker, critic)
    for i in env.steps():
        with env.step():
            real, _ = rows(env, i)
            made = maker(rows(env, 50 + i)[0])
            for_critic.zero_grad()
            (F.softplus(critic(made.detach())) + F.softplus(-critic(real))).mean().backward()
            for_critic.step()
            for_maker.zero_grad()
            F.softplus(-critic(made)).mean().backward()
            for_maker.step()


@loop
def siamese(env: Env) -> None:
    model = mlp()
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            left, right = model(rows(env, i)[0]), model(rows(env, 50 + i)[0])
            F.cosine_embedding_loss(left, right, torch.ones(ROWS, device=env.device)).backward()
            optimizer.step()
            optimizer.zero_grad()


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(2, WIDTH), mlp(2, WIDTH)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.scale.exp() * a @ b.T


@loop
def contrastive(env: Env) -> None:
    model = TwoTowers()
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            similar = model(rows(env, i)[0], rows(env, 50 + i)[0])
            target = torch.arange(ROWS, device=env.device)
            ((F.cross_entropy(similar, target) + F.cross_entropy(similar.T, target)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def preferences(env: Env) -> None:
    model = LanguageModel().to(env.device)
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = AdamW(model.parameters())
    env.plan(model)
    env.keep(model)
    for i in env.steps():
        with env.step():
            good, bad = tokens(env, i), tokens(env, 50 + i)
            with torch.no_grad():
                known = log_likelihood(reference, good) - log_likelihood(reference, bad)
            margin = log_likelihood(model, good) - log_likelihood(model, bad) - known
            (-F.logsigmoid(0.1 * margin)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def distillation(env: Env) -> None:
    teacher, student = LanguageModel(4).eval(), LanguageModel(2)
    teacher.to(env.device)
    student.to(env.device)
    optimizer = AdamW(student.parameters())
    env.plan(student, others=[teacher])
    env.keep(student)
    for i in env.steps():
        with env.step():
            ids = tokens(env, i)
            with torch.no_grad():
                wanted = teacher(ids)["logits"].log_softmax(-1)
            got = student(ids)["logits"].log_softmax(-1)
            F.kl_div(got, wanted, log_target=True, reduction="batchmean").backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def rollouts(env: Env) -> None:
    policy = mlp(3).to(env.device)
    optimizer = AdamW(policy.parameters())
    env.plan(policy)
    env.keep(policy)
    for i in env.steps():
        with env.step():
            losses = []
            for turn in range(3):
                chosen = torch.distributions.Categorical(logits=policy(rows(env, 3 * i + turn)[0]))
                action = chosen.sample()
                losses.append(-(chosen.log_prob(action) * (action == 0)).mean())
            torch.stack(losses).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def clipped_policy_updates(env: Env) -> None:
    policy = mlp(3).to(env.device)
    optimizer = AdamW(policy.parameters())
    env.plan(policy)
    env.keep(policy)
    for i in env.steps():
        with env.step():
            x, _ = rows(env, i)
            with torch.no_grad():
                chosen = torch.distributions.Categorical(logits=policy(x))
                action = chosen.sample()
                before = chosen.log_prob(action)
            for _ in range(2):
                now = torch.distributions.Categorical(logits=policy(x)).log_prob(action)
                ratio = (now - before).exp()
                (-torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * (action == 0)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()


@loop
def gradient_penalty(env: Env) -> None:
    critic = mlp(out=1).to(env.device)
    optimizer = AdamW(critic.parameters())
    env.plan(critic)
    env.keep(critic)
    for i in env.steps():
        with env.step():
            x = rows(env, i)[0].requires_grad_(True)
            out = critic(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.mean() + (slope.norm(dim=-1) - 1).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(3, 1)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.requires_grad_(True)
        energy = self.energy(positions).sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -forces


@loop
def forces(env: Env) -> None:
    model = Forces()
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            energy, force = model(rows(env, i)[0])
            (energy.square() * 1e-3 + force.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()


class Equilibrium(nn.Module):
    """Iterate without a graph to a fixed point, and once more with one."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = Block(), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(6):
                z = torch.tanh(self.inside(z) + x)
        return self.head(torch.tanh(self.inside(z) + x))  # type: ignore[no-any-return]


@loop
def deep_equilibrium(env: Env) -> None:
    classification(env, Equilibrium())


@loop
def weight_norm_layers(env: Env) -> None:
    model = mlp()
    for block in list(model)[:4]:
        weight_norm(block.get_submodule("up"))
    classification(env, model)


@loop
def spectral_norm_layers(env: Env) -> None:
    model = mlp()
    for block in list(model)[:4]:
        spectral_norm(block.get_submodule("up"))
    classification(env, model)


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(5)), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()).item() > 0.3:
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@loop
def stochastic_depth(env: Env) -> None:
    classification(env, StochasticDepth())


def classification(env: Env, model: nn.Module) -> None:
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def packed_sequences(env: Env) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])
            return self.head(out.mean(0))  # type: ignore[no-any-return]

    model = Reader()
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i, 24 * 16)
            F.cross_entropy(model(x.view(24, 16, WIDTH), torch.arange(9, 25)), y[:16]).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def batches_of_two_lengths(env: Env) -> None:
    model = LanguageModel()
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            ids = tokens(env, i, TOKENS if i % 2 == 0 else TOKENS // 2)
            model(ids, labels=ids)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def two_optimizers(env: Env) -> None:
    model = mlp().to(env.device)
    first, second = AdamW(model[:2].parameters()), SGD(model[2:].parameters(), lr=1e-2, momentum=0.9)
    env.plan(model)
    env.keep(model)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i)
            F.cross_entropy(model(x), y).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()


@loop
def optimizer_in_backward(env: Env) -> None:
    model = mlp().to(env.device)
    optimizers = {p: SGD([p], lr=1e-2, momentum=0.9) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    with ExitStack() as hooks:  # a hook that stays would keep the model alive
        for parameter in model.parameters():
            hooks.callback(parameter.register_post_accumulate_grad_hook(update).remove)
        env.plan(model)
        env.keep(model)
        for i in env.steps():
            with env.step():
                x, y = rows(env, i)
                F.cross_entropy(model(x), y).backward()


@loop
def sharpness_aware(env: Env) -> None:
    model = mlp().to(env.device)
    optimizer = SGD(model.parameters(), lr=1e-2)
    env.plan(model)
    env.keep(model)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i)
            F.cross_entropy(model(x), y).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            moved = [0.05 * gradient / (gradient.norm() + 1e-6) for gradient in gradients]
            del gradients
            with torch.no_grad():
                for parameter, by in zip(model.parameters(), moved, strict=True):
                    parameter.add_(by)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for parameter, by in zip(model.parameters(), moved, strict=True):
                    parameter.sub_(by)
            optimizer.step()
            optimizer.zero_grad()


@loop
def lbfgs(env: Env) -> None:
    model = mlp(2).to(env.device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=2)
    env.plan(model)
    env.keep(model)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)  # noqa: B023 - called in this step
                loss.backward()
                return loss

            optimizer.step(closure)


@loop
def last_loss_is_logged_later(env: Env) -> None:
    model = mlp()
    optimizer = planned(env, model)
    history: list[Tensor] = []
    for i in env.steps():
        with env.step():
            x, y = rows(env, i)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.detach())


@loop
def truncated_time(env: Env) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

        def forward(self, xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            for x in xs:
                h = self.cell(x, h)
            return self.head(h), h

    model = Cell()
    optimizer = planned(env, model)
    h = torch.zeros(16, WIDTH, device=env.device)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i, 12 * 16)
            logits, h = model(x.view(12, 16, WIDTH), h.detach())
            F.cross_entropy(logits, y[:16]).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def a_step_raises(env: Env) -> None:
    model = mlp()
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            x, y = rows(env, i)
            if i == 2:
                try:
                    model(x[:, :-1])
                except RuntimeError:
                    continue
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


# --- loops whose form changes, and models that share a device (tests/client/planning/test_training_loops.py)


def each_step(
    env: Env, model: nn.Module, train: Callable[[int], None], optimizer: Any = None, *, zeroes: bool = True
) -> None:
    """Run `train` in each step, then the optimizer; the model is planned, unless an optimizer is passed."""
    optimizer = optimizer or planned(env, model)
    for i in env.steps():
        with env.step():
            train(i)
            optimizer.step()
            if zeroes:
                optimizer.zero_grad()


def loss_of(env: Env, model: nn.Module, seed: int) -> Tensor:
    x, y = rows(env, seed)
    return F.cross_entropy(model(x), y)


@repeats_from(2)
def forwards_pair_later(env: Env) -> None:
    model = mlp(drop=0.1)
    each_step(
        env,
        model,
        lambda i: torch.autograd.backward([loss_of(env, model, 2 * i + n) for n in range(1 + (i > 1))]),
    )


@loop
def pairs_and_single_forwards_take_turns(env: Env) -> None:
    model = mlp()

    def train(i: int) -> None:
        torch.autograd.backward([loss_of(env, model, 3 * i + n) for n in range(2)])
        loss_of(env, model, 3 * i + 2).backward()

    each_step(env, model, train)


@repeats_from(2)
def large_loss_later(env: Env) -> None:
    model = mlp(out=WIDTH)
    head = torch.randn(WIDTH, 2048, device=env.device)

    def train(i: int) -> None:
        x, y = rows(env, i)
        out = model(x)
        (F.cross_entropy(out @ head, y) if i > 1 else out.square().mean()).backward()

    each_step(env, model, train)


def twice(env: Env, begins: int) -> None:
    """Retain the graph from the step `begins` on."""
    model = mlp()

    def train(i: int) -> None:
        loss = loss_of(env, model, i)
        if i >= begins:
            loss.backward(retain_graph=True)
        loss.backward()

    each_step(env, model, train)


@loop
def retained_graph(env: Env) -> None:
    twice(env, 0)


@repeats_from(2)
def retained_graph_later(env: Env) -> None:
    twice(env, 2)


@repeats_from(2)
def optimizer_steps_later(env: Env) -> None:
    model = mlp()
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            loss_of(env, model, i).backward()
            if i > 1:
                optimizer.step()
            optimizer.zero_grad()


@loop
def gradients_are_never_zeroed(env: Env) -> None:
    model = mlp()
    each_step(env, model, lambda i: loss_of(env, model, i).backward(), zeroes=False)


@repeats_from(3)
def zeroes_between_forward_and_backward_at_first(env: Env) -> None:
    model = mlp()
    optimizer = planned(env, model)
    for i in env.steps():
        with env.step():
            loss = loss_of(env, model, i)
            if i < 3:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@repeats_from(2)
def another_dtype_later(env: Env) -> None:
    model = mlp()
    optimizer = planned(env, model)
    for i in env.steps():
        if i == 2:
            model.double()
            optimizer.state.clear()
        with env.step():
            x, y = rows(env, i)
            F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
            optimizer.step()
            optimizer.zero_grad()


@repeats_from(2)
def layers_skipped_at_first(env: Env) -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.every = mlp(6), False

        def forward(self, x: Tensor) -> Tensor:
            for n, layer in enumerate(self.layers):
                x = layer(x) if self.every or n % 2 == 0 else x
            return x

    whole = Skipping()

    def step(i: int) -> None:
        whole.every = i > 1
        loss_of(env, whole, i).backward()

    each_step(env, whole, step)


@repeats_from(2)
def outputs_held_later(env: Env) -> None:
    model = LanguageModel()

    def train(i: int) -> None:
        ids = tokens(env, i)
        if i < 2:
            model(ids, labels=ids)["loss"].backward()
        else:
            out = model(ids, labels=ids)
            out["loss"].backward()

    each_step(env, model, train)


@loop
def meta_learning(env: Env) -> None:
    model = mlp(2)

    def train(i: int) -> None:
        weights: dict[str, Tensor] = dict(model.named_parameters())
        x, y = rows(env, i)
        for _ in range(2):
            loss = F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
            made = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), made, strict=True)}
        F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y).backward()

    each_step(env, model, train)


@loop
def encoder_and_decoder(env: Env) -> None:
    models = [mlp(3, WIDTH).to(env.device), mlp(3).to(env.device)]
    optimizer = AdamW([p for model in models for p in model.parameters()])
    for model in models:
        env.plan(model)
        env.keep(model)

    def train(i: int) -> None:
        x, y = rows(env, i)
        F.cross_entropy(models[1](models[0](x)), y).backward()

    each_step(env, models[0], train, optimizer)
