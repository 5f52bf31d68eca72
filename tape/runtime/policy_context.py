"""Define the public context manager of regions."""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable
from functools import partial
from types import TracebackType
from typing import Any

from autoac.tape.capture.step_tape import StepTape
from autoac.tape.runtime.cursor import UseGroup
from autoac.tape.runtime.cuts import Cuts
from autoac.tape.runtime.nested_policies import PlannedPolicy, PolicyFrame, parse_policy
from autoac.tape.runtime.region import Region
from autoac.tape.runtime.replay import Log
from autoac.tape.torch_facts.inductor import dynamo_is_active, keep_dynamo_out


class _Active(threading.local):
    """The region that is open on this thread."""

    region: Region | None = None


active = _Active()


class save_recompute_policy:
    """Run the body under `policy`, which says what is saved for backward and what backward recomputes.

    Regions nest: the outermost installs the runtime, and inner ones only push their policy. The stack of
    policies is resolved from the outermost to the innermost: it starts with PREFER_SAVE, a MUST beats a
    PREFER, and two different MUSTs are an error. Regions of generators and coroutines that interleave on one
    thread share one runtime, which is removed with the last of them.

    Args:
        policy: "recompute_all"; "must_save_all"; a list of ops to save; or a function
            `(ctx, out, op, *args, **kwargs) -> CheckpointPolicy | bool`, called after each op.
        cuts: of an outermost "recompute_all" without a plan: say online what is held all the same (cuts.py).
        tape: of such a policy: records the step.

    Raises:
        TypeError, ValueError: `policy` is none of these.
        PolicyConflict: from an op inside, on which two policies insist differently.
        RuntimeError: on entering, if this object is entered already, or inside of torch.compile or
            torch.func.grad and the like; on leaving, if that happens on another thread, or before a mode or
            hook that was entered inside is left.
    """

    def __init__(
        self,
        policy: Any,
        *,
        log: Log | None = None,
        checkpoint: UseGroup | None = None,
        site: Hashable = None,
        cuts: Cuts | None = None,
        tape: StepTape | None = None,
    ) -> None:
        self._policy = parse_policy(policy)
        self._checkpoint = checkpoint
        self._site = site
        self._outermost = partial(Region, log, cuts=cuts, tape=tape)
        self._entered: tuple[Region, PolicyFrame] | None = None

    def __enter__(self) -> None:
        if dynamo_is_active():
            raise RuntimeError(
                f"save_recompute_policy must not be entered inside of torch.compile: {_OUT_OF_COMPILED}"
            )
        if self._entered is not None:
            raise RuntimeError(
                "this save_recompute_policy is already entered: create one for each with-block"
            )
        caller = sys._getframe(1)
        region = active.region
        if region is None:
            region = self._outermost()
            region.open()
            active.region = region
        is_planned = isinstance(self._policy, PlannedPolicy)
        site = None if is_planned else self._site or (caller.f_code, caller.f_lineno)
        frame = PolicyFrame(self._policy, caller.f_code.co_filename, caller.f_lineno, self._checkpoint, site)
        region.push_policy(frame)
        self._entered = region, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._leave() and (error is None or isinstance(error, GeneratorExit)):
            # The region saves all that it sees, until a region opened on its own thread takes it over.
            raise RuntimeError(
                "a region must be left on the thread that entered it, and after the dispatch modes and "
                "saved-tensor hooks that were entered inside: leave the region before you pass it on"
            )

    def __del__(self) -> None:
        if getattr(self, "_entered", None) is not None:
            self._leave()  # entered by hand, and an exception skipped the exit

    def _leave(self) -> bool:
        """Pop the policy; return False if it was the last and the region cannot be closed from here."""
        entered, self._entered = self._entered, None
        assert entered is not None
        region, frame = entered
        # Generators and coroutines that suspend inside leave in any order.
        if not region.pop_policy(frame):
            return True
        region.resume()
        if active.region is not region or not region.is_innermost():
            return False
        active.region = None
        region.close()
        return True


_OUT_OF_COMPILED = (
    "leave the code that enters it uncompiled and compile what runs inside, or use ac_client.checkpoint, "
    "which calls torch's own there"
)
keep_dynamo_out(save_recompute_policy.__enter__, f"save_recompute_policy records ops; {_OUT_OF_COMPILED}")
