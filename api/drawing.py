"""What the page of a policy draws: the policy carried out on the profile that it was made from. Pure.

`planner.picture` has the timelines; beside them stands what became of each op, for the map of layers and ops.
"""

from __future__ import annotations

import gzip
import json

from autoac.planner.modules import Decided, Fate, decided
from autoac.planner.picture import picture
from autoac.planner.policy import Policy
from autoac.planner.profile import Profile
from autoac.planner.whatif import as_planned

IDLE, KEPT, AGAIN = range(3)
"""What became of an op: backward asks for nothing of it, it is kept, it is run again."""

_FATES = {Fate.IDLE: IDLE, Fate.KEPT: KEPT, Fate.AGAIN: AGAIN}
_OF_FATES = {number: fate for fate, number in _FATES.items()}
LEVEL = 6  # of gzip: a fourth of the JSON, in hundredths of a second


def drawing_body(profile: bytes, policy: bytes) -> bytes:
    """The body that a child gets: both in their published forms, in one object."""
    return b'{"profile": ' + profile + b', "policy": ' + policy + b"}"


def draw_body(body: bytes) -> bytes:
    """The drawing of a `drawing_body`.

    Raises:
        OtherProfile: the policy was not made from this profile.
        MalformedProfile: it is none.
    """
    both = json.loads(body)
    return draw(Profile.from_data(both["profile"]), Policy.model_validate(both["policy"]))


def draw(profile: Profile, policy: Policy) -> bytes:
    """What the page of `policy` draws: JSON, gzip. Bytes and microseconds.

    Raises:
        OtherProfile: the policy was not made from this profile.
    """
    plan = as_planned(policy, profile)
    fates = decided(plan.graph, plan.save_set)
    data = picture(plan, policy=policy).data() | {
        "fates": {  # by op
            "fate": [_FATES[op.fate] for op in fates],
            "nbytes": [op.kept_bytes or op.recomputed_bytes for op in fates],
            "runtime_us": [op.runtime_us for op in fates],
        }
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), LEVEL, mtime=0)


def became(drawing: bytes, policy: Policy) -> list[Decided]:
    """What became of each op of `policy`, as its drawing has it, in forward order."""
    fates = json.loads(gzip.decompress(drawing))["fates"]
    return [
        Decided(key, fate, nbytes if fate is Fate.KEPT else 0, nbytes if fate is Fate.AGAIN else 0, us)
        for key, fate, nbytes, us in zip(
            policy.decisions,
            (_OF_FATES[number] for number in fates["fate"]),
            fates["nbytes"],
            fates["runtime_us"],
            strict=True,
        )
    ]
