"""The public names of the planner."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import autoac.planner


def test_the_public_names_are_these_and_exist() -> None:
    names = autoac.planner.__all__
    assert sorted(set(names)) == sorted(names)
    assert all(hasattr(autoac.planner, name) for name in names)
    expected = {"plan", "find_minimum_peak", "Plan", "Policy", "Profile", "simulate", "schedule", "explain"}
    assert expected <= set(names)


def test_the_examples_in_docstrings_are_true() -> None:
    tried = 0
    for module in pkgutil.walk_packages(autoac.planner.__path__, "autoac.planner."):
        result = doctest.testmod(importlib.import_module(module.name))
        assert not result.failed, module.name
        tried += result.attempted
    assert tried > 3
