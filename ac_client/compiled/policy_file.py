"""Keep the policy of a compiled step next to its code, so that later processes do not plan it again.

Run times differ from profile to profile. A policy that depended on the latest ones would save slightly other
tensors in each process, and all code would be compiled again. So a policy is found by all of the profile
but its times.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

import torch

from ac_client.files import write_whole
from autoac import planner
from autoac.planner.formats.policy import Policy
from autoac.planner.formats.profile import OpFlag, Profile
from autoac.profiler.compiler.private_compiler import compiler_cache_dir
from autoac.profiler.compiler.source_digest import source_digest

log = logging.getLogger("ac_client")


class PolicyFile:
    """The file with the policy for a profile, times aside, and terms.

    Other terms, or another planner, have another file.

    Args:
        terms: what the plan depends on, other than the profile.
    """

    def __init__(self, profile: Profile, terms: Iterable[object]) -> None:
        self._path: Path | None = None
        if is_compiled(profile) and not torch.compiler.config.force_disable_caches:
            text = repr(
                (
                    _without_times(profile).model_dump_json(),
                    *terms,
                    source_digest(Path(planner.__file__).parent),
                )
            )
            name = f"policy-{hashlib.sha256(text.encode()).hexdigest()}.json"
            self._path = compiler_cache_dir() / "autoac" / name

    def read(self) -> Policy | None:
        """Return the policy; None if no process has stored it, or with a warning if the file is invalid."""
        if self._path is None or not self._path.exists():
            return None
        try:
            return Policy.model_validate_json(self._path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            log.warning("the step is planned again: cannot read %s: %s", self._path, error)
            return None

    def write(self, policy: Policy) -> None:
        """Store `policy` for later processes. Warn if that is impossible."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, policy.model_dump_json())
        except OSError as error:
            log.warning("later processes plan the step again: cannot write %s: %s", self._path, error)


def _without_times(profile: Profile) -> Profile:
    ops = profile.ops.model_copy(update={"runtime_us": (), "spread_us": ()})
    backward = profile.backward.model_copy(update={"runtime_us": ()})
    others = {"link": None, "notes": ()}
    return profile.model_copy(update={"ops": ops, "backward": backward, **others})


def is_compiled(profile: Profile) -> bool:
    """Return True if torch.compile ran the whole forward of the profiled step."""
    of_model = profile.ops.flags[: profile.loss_begins]
    return bool(of_model) and all(flags & OpFlag.COMPILED for flags in of_model)
