"""Test the behavior of the stand-in that the other tests of this folder rely on."""

import torch


def test_tensors_count_in_blocks_of_512_bytes(gpu):
    before = gpu.live(0)
    held = torch.ones(129, device="cuda")
    assert held.device == torch.device("cuda", 0)
    assert gpu.live(0) == before + 1024 == torch.cuda.memory_allocated()
