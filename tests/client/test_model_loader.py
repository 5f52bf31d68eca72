"""Reading a model and its batch from what the user's function returns."""

import pytest
from torch import nn

from ac_client.errors import CommandError
from ac_client.model_loader import setup_from

LAYER = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("returned", "fields"),
    [
        ((LAYER, (1,), {"a": 2}), (LAYER, (1,), {"a": 2}, None)),
        ((LAYER, [1], {}, sum), (LAYER, (1,), {}, sum)),
        ({"model": LAYER}, (LAYER, (), {}, None)),
        ({"model": LAYER, "args": (1,), "loss": sum}, (LAYER, (1,), {}, sum)),
    ],
)
def test_function_may_return_a_tuple_or_a_dict(returned, fields):
    setup = setup_from(returned, "m:f")
    assert (setup.model, setup.args, setup.kwargs, setup.loss) == fields


@pytest.mark.parametrize("returned", [LAYER, (LAYER,), {"modle": LAYER}, (LAYER, 1, {}), (1, (), {}), None])
def test_other_return_values_are_an_error(returned):
    with pytest.raises(CommandError, match="m:f returned"):
        setup_from(returned, "m:f")
