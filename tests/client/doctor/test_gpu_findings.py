"""Test the doctor's judgements, its report, and its two ranks, without a GPU."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ac_client.cli.main import main
from ac_client.doctor.device_facts import datasheet_like
from ac_client.doctor.gpu_checks import _numbers_finding, _peak_finding, _time_finding
from ac_client.doctor.gpu_report import GpuFinding, GpuReport, Result, finding_of_error, redacted
from ac_client.doctor.sample_training import Numbers, Trained
from ac_client.doctor.two_ranks import train_on_two_ranks
from autoac.profiler import DATASHEETS, profile


def trained(gradient: float = 1.0, device_ms: float = 10.0, wall_ms: float = 10.0) -> Trained:
    numbers = Numbers({"loss": torch.tensor(2.0), "gradient of w": torch.tensor([gradient, 0.0])})
    return Trained(100, 0, numbers, device_ms, 5.0, wall_ms)


@pytest.mark.parametrize(
    ("again", "planned", "verdict", "words"),
    [
        (1.0, 1.0, Result.OK, "plain equals plain bit for bit; planned (3 ops recomputed) too"),
        (1.0, 1.0001, Result.WRONG, "differs in 1 of 2 tensors"),
        (1.0, float("nan"), Result.WRONG, "differs in 1 of 2 tensors"),
        (1.0001, 1.0002, Result.NOTE, "plain differs from plain in 1 of 2 tensors"),
        (1.0001, 1.01, Result.WRONG, "kernels of this device are not deterministic here"),
    ],
)
def test_planned_gradients_are_judged_by_those_of_two_plain_steps(
    again: float, planned: float, verdict: Result, words: str
) -> None:
    runs = (trained(gradient).numbers for gradient in (1.0, again, planned))
    found = _numbers_finding("gradients", *runs, recomputed=3)
    assert found.verdict is verdict
    assert words in found.text


@pytest.mark.parametrize(
    ("predicted", "measured", "verdict"),
    [
        (1000, 1000, Result.OK),
        (1000, 1009, Result.NOTE),
        (1000, 1011, Result.WRONG),
        (1000, 989, Result.WRONG),
    ],
)
def test_peak_is_wrong_if_it_is_more_than_a_hundredth_off(
    predicted: int, measured: int, verdict: Result
) -> None:
    found = replace(trained(), peak_bytes=measured)
    assert _peak_finding("peak", predicted, found).verdict is verdict


def test_time_is_wrong_if_it_is_off_by_a_factor_of_two() -> None:
    found = profile(torch.nn.Linear(2, 2), torch.ones(1, 2))
    by_predicted = {
        ms: _time_finding("time", ms, trained(), found).verdict for ms in (4.9, 7.0, 10.0, 12.0, 13.0, 21.0)
    }
    assert list(by_predicted.values()) == [
        *(
            Result.WRONG,
            Result.NOTE,
            Result.OK,
            Result.OK,
            Result.NOTE,
            Result.WRONG,
        ),
    ]
    assert "host-bound" in _time_finding("time", 10.0, trained(wall_ms=13.0), found).text
    noted = found.model_copy(update={"notes": ("run times include time of the host: torch cannot queue it",)})
    assert _time_finding("time", 99.0, trained(), noted).verdict is Result.NOTE


def test_error_of_a_check_has_no_paths_and_no_host() -> None:
    try:
        raise FileNotFoundError(
            2, f"no such file on {socket.gethostname()}", "/home/somebody/secret/data.bin"
        )
    except FileNotFoundError as error:
        found = finding_of_error("a check", error)
    assert found.verdict is Result.WRONG
    assert "data.bin" in found.text
    assert "test_gpu_findings.py:" in found.text
    assert not any(word in found.text for word in ("somebody", "secret", socket.gethostname()))


def test_text_without_paths_stays_as_it_is() -> None:
    text = "blocks.0/aten.mm.default#1: 3/4 of 10 MB/s, sha256/abc"
    assert redacted(text) == text


def test_report_shows_what_is_wrong_first_and_reads_as_json() -> None:
    findings = [
        GpuFinding("peak", Result.OK, "a | b", {"n": 1}),
        GpuFinding("time", Result.WRONG, "slow"),
    ]
    report = GpuReport({"torch": "2"}, findings)
    page = report.to_markdown()
    assert (
        page.index("- **time**: slow") < page.index("| torch | 2 |") < page.index("| peak | ok | a \\| b |")
    )
    data = json.loads(report.to_json())
    assert (data["format"], data["version"], data["ok"]) == ("autoac.gpu-report", 1, False)
    assert data["findings"][0] == {"check": "peak", "verdict": "ok", "text": "a | b", "figures": {"n": 1}}
    assert not GpuReport({}, findings[:1]).failed


def test_doctor_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--gpu", "--out", str(tmp_path / "report.md")])
    assert ended.value.code == 1
    assert "doctor --gpu needs a GPU, got none" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "capability", "like"),
    [
        ("NVIDIA GH200 480GB", (9, 0), "h200"),
        ("NVIDIA H100 PCIe", (9, 0), "h100"),
        ("NVIDIA B200", (10, 0), "h100"),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), "rtx4090"),
    ],
)
def test_datasheet_has_the_architecture_of_the_device_and_rates_of_a_similar_one(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], like: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    found = datasheet_like(torch.device("cuda", 0))
    assert (found.capability, found.cudnn) == (capability, 91002)
    assert found.flops_per_s == DATASHEETS[like].flops_per_s


def test_two_ranks_compare_planned_with_plain_training() -> None:
    """Over gloo on the CPU; on two GPUs the same code runs over NCCL."""
    found = train_on_two_ranks("gloo", "cpu")
    assert found.verdict is Result.OK, found.text
    assert "gradients equal plain's bit for bit" in found.text
    assert found.figures["recomputed"]
