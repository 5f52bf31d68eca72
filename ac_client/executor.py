"""Name what models and training loops call of the executor, and the errors that it raises in them."""

from autoac.tape.runtime.checkpoint import checkpoint as checkpoint
from autoac.tape.runtime.checkpoint import checkpoint_sequential as checkpoint_sequential
from autoac.tape.runtime.cursor import LeftThePath as LeftThePath
from autoac.tape.runtime.nested_policies import PolicyConflict as PolicyConflict
from autoac.tape.runtime.policy_context import save_recompute_policy as save_recompute_policy
from autoac.tape.runtime.split_backward import split_backward as split_backward
from autoac.tape.runtime.write_guard import ContentsDiffer as ContentsDiffer
from autoac.tape.runtime.write_guard import StaleError as StaleError
