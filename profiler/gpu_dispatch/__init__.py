"""Choose kernels and types as torch does on a GPU, for fake steps without one: rules copied from torch's C++.

gpu_kernels.py        which kernels composite ops run: norms, dropout, softmax, recurrent cells
gpu_attention.py      which kernel scaled_dot_product_attention runs
gpu_autocast.py       what autocast casts
gpu_fake_kernels.py   what kernels allocate that the fakes of torch do not

Each file names its sources. When torch changes, compare them again, then change `COPIED_FROM`.
"""

from autoac.tape.torch_facts import minor_version

COPIED_FROM = (2, 13)
"""The release of torch whose sources were compared last; a test fails if the pinned one is another."""


def notes() -> list[str]:
    """Return a note for the profile if the installed torch is another release."""
    copied, installed = (".".join(map(str, version)) for version in (COPIED_FROM, minor_version()))
    same = installed == copied
    return [] if same else [f"which kernels a GPU runs is known of torch {copied}, got torch {installed}"]
