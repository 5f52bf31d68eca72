"""`autoac fit`: a table of sizes, or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from client.cli import command

from ac_client.cli.exit_codes import ERROR, OK, USAGE
from autoac.planner import PolicySet

SIZED = """
import torch
from torch import nn

def make(size):
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())))
        return model, torch.empty(size * 1024, 256)

def real(size):
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    return model, torch.ones(size * 64, 64)

def wrong(size):
    return 3

def laid(size, mesh):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(1 + mesh["tp"].size())))
    return fully_shard(model, mesh=mesh["dp"]), torch.empty(size * 1024, 256)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command.module_in(tmp_path, "sized", SIZED, monkeypatch)


def run(capsys: Any, *argv: str) -> tuple[Any, str, str]:
    return command.run(capsys, "fit", *argv)


def test_the_table_marks_the_fastest_and_the_largest_size(capsys: Any) -> None:
    code, out, err = run(capsys, "sized:make", "--budget-gb", "0.1", "--on", "h100")
    assert code == OK, err
    lines = out.splitlines()
    assert sum("fastest" in line.split() for line in lines) == 1
    assert sum("largest" in line.split() for line in lines) == 1
    assert "is proven not to fit" in out
    assert "parameters 1.00 MiB" in out


def test_json_has_the_answers_and_every_row(capsys: Any) -> None:
    argv = "sized:make --budget-gb 0.1 --on h100 --json --multiple 2"
    code, out, _ = run(capsys, *argv.split())
    facts = json.loads(out)
    assert code == OK
    sizes = [row["size"] for row in facts["rows"]]
    assert {facts["largest"], facts["fastest"]} <= set(sizes)
    assert all(size % 2 == 0 for size in sizes)
    assert facts["proven_from"] == facts["largest"] + 2


def test_policies_are_written_for_training_to_start_planned(capsys: Any) -> None:
    code, out, err = run(capsys, "sized:real", "--budget-gb", "0.004", "--most", "6", "-o", "policies.json")
    assert code == OK, err
    assert out.splitlines()[-1].endswith('train with ac_client.apply(model, policy="policies.json").')
    policies = PolicySet.from_json(Path("policies.json").read_text())
    head = next(line for line in out.splitlines() if line.startswith("batch"))
    assert head.split()[-1] == "samples/s"
    assert "in turns" in out
    assert "No size above 6 was considered." in out or "proven" in out
    largest = next(line.split()[0] for line in out.splitlines() if "largest" in line.split())
    assert max(bucket.shape["0"] for bucket in policies.buckets) == f"float32[{64 * int(largest)}, 64]"
    assert "profiling a step of size 1" in err
    assert "in turns" in err


def test_layouts_are_compared_by_bytes_and_not_by_time(capsys: Any) -> None:
    argv = ("sized:laid", "--budget-gb", "0.1", "--on", "h100", "--ranks", "4", "--layouts", "tp=2,1")
    code, out, err = run(capsys, *argv, "--most", "8")
    assert code == OK, err
    head, *rows = out.splitlines()
    assert head.split()[-3:] == ["of", "all", "ranks"]
    assert [row.split()[:2] for row in rows[:2]] == [["dp=4", "tp=1"], ["dp=2", "tp=2"]]
    assert "Collectives are not timed" in out
    code, out, _ = run(capsys, *argv, "--most", "8", "--json")
    assert [row["dimensions"] for row in json.loads(out)] == [{"dp": 4, "tp": 1}, {"dp": 2, "tp": 2}]


def test_a_mesh_that_ranks_name_is_passed_on(capsys: Any) -> None:
    argv = ("sized:laid", "--budget-gb", "0.1", "--on", "h100", "--most", "4", "--json")
    largest = {}
    for ranks in ("dp=4,tp=1", "dp=2,tp=2"):
        code, out, err = run(capsys, *argv, "--ranks", ranks)
        assert code == OK, err
        largest[ranks] = json.loads(out)["rows"][0]["peak_bytes"]
    assert largest["dp=4,tp=1"] < largest["dp=2,tp=2"]  # the model has as many layers as ranks of tp, and one


MADE, LAID = (f"sized:{name} --budget-gb 1 --on h100" for name in ("make", "laid"))


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        *(
            (f"{LAID} --ranks {ranks}", USAGE)
            for ranks in ("0", "four", "dp=2,dp=2", "dp=0", "4,tp=2", "dp=2,")
        ),
        (f"{LAID} --ranks=", USAGE),
        ("sized:laid --budget-gb 1 --ranks dp=2,tp=2", USAGE),
        (f"{LAID} --ranks dp=2,tp=2 --layouts tp=1", USAGE),
        (f"{MADE} --layouts tp=1", USAGE),
        (f"{LAID} --ranks 4 --layouts tp=3", USAGE),
        (f"{LAID} --ranks 4 --layouts tp", USAGE),
        (f"{MADE} --ranks 4 --layouts tp=1", ERROR),
        ("sized:make --budget-gb 1 --on abacus", USAGE),
        ("sized:make --budget-gb -1 --on h100", USAGE),
        (f"{MADE} --multiple 8 --most 4", USAGE),
        ("sized:make --budget-gb 0.000001 --on h100", ERROR),
        ("sized:wrong --budget-gb 1 --on h100", ERROR),
        ("sized:missing --budget-gb 1 --on h100", ERROR),
    ],
)
def test_what_is_wrong_has_its_exit_code_and_one_line(capsys: Any, argv: str, code: int) -> None:
    found, _, err = run(capsys, *argv.split())
    assert found == code
    assert err.splitlines()[-1].startswith("autoac: ")
