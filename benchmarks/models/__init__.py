"""The model zoo that tests and benchmarks share, in several sizes.

`tiny` takes milliseconds a step and is for tests; `medium` is the same architectures at about a second a step
on one CPU core; `unfamiliar` is twenty more of transformers, as small; `large` is published configurations on
the meta device. `modules` has hand-written modules.
"""
