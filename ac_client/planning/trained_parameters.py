"""Notice a change of which parameters train and in which dtype, since the saved tensors depend on both."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from autoac.tape.distributed.fsdp import parameters_of
from autoac.tape.torch_facts.gradients import gradient_of

SAMPLED_PER_FORWARD = 16  # parameters that each forward looks at
GRADIENT_PROBES = 8  # parameters at which a forward looks for gradients

TrainedKey = tuple[bool, tuple[tuple[bool, torch.dtype], ...]]
"""Training mode, and by parameter: does it train, and in which dtype."""


class TrainedParameters:
    """A model's parameters as they were when `look` was called last.

    Attributes:
        key: equal for equal states of training; batches share policies only under one key.
    """

    def __init__(self, model: nn.Module) -> None:
        self._turn = 0
        self.look(model)

    def look(self, model: nn.Module) -> None:
        """Take note of the mode of `model` and of its parameters as they are now."""
        parameters = list(parameters_of(model))
        kinds = tuple((p.requires_grad, p.dtype) for p in parameters)
        # One assignment: forwards on other threads read the pairs without a lock.
        self._seen = tuple((weakref.ref(p), kind) for p, kind in zip(parameters, kinds, strict=True))
        self.key: TrainedKey = model.training, kinds
        trainable = [weakref.ref(p) for p in parameters if p.requires_grad]
        self._probes = trainable[:: max(1, len(trainable) // GRADIENT_PROBES)]

    def sample_changed(self, model: nn.Module) -> bool:
        """Return True if the mode changed, or `requires_grad` or the dtype on a sample of the parameters.

        To look at all of them would take longer than everything else in the hook. Each call takes an evenly
        spread sample, and the next call their neighbors. So layers that are frozen or thawed are noticed at
        once, a single parameter within a few forwards.
        """
        stride = -(-len(self._seen) // SAMPLED_PER_FORWARD) or 1
        self._turn = (self._turn + 1) % stride
        return model.training is not self.key[0] or self._changed(slice(self._turn, None, stride))

    def changed(self, model: nn.Module) -> bool:
        """Return True if the mode changed, or `requires_grad` or the dtype on a parameter that still exists.

        A layer that was taken out is not one that was frozen: the forward leaves its policy, and reports it.
        """
        return model.training is not self.key[0] or self._changed(slice(None))

    def gradients_exist(self) -> bool:
        """Return True if a sample of the trainable parameters has gradients."""
        return bool([0 for ref in self._probes if (p := ref()) is not None and gradient_of(p) is not None])

    def _changed(self, sample: slice) -> bool:
        changed = [
            ref
            for ref, (trains, dtype) in self._seen[sample]
            if (p := ref()) is not None and (p.requires_grad != trains or p.dtype is not dtype)
        ]
        return bool(changed)
