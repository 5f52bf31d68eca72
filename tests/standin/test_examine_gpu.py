"""Run `autoac doctor --gpu` on the stand-in, with a tiny model."""

from __future__ import annotations

import functools
import json
import math
import socket
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from ac_client.cli.main import main
from ac_client.doctor import examine_gpu as examination
from ac_client.doctor.device_facts import error_in_words, redacted
from ac_client.doctor.examine_gpu import GpuReport, SampleModel, SampleSize, TrainedSample, examine_gpu

TINY = SampleSize(layers=3, width=32, tokens=32, vocabulary=64, batch=2)


@functools.cache
def report() -> GpuReport:
    return examine_gpu(TINY)


def test_peaks_are_predicted_to_the_byte_and_bits_are_equal(gpu: ModuleType) -> None:
    assert report().wrong == []
    for found in report().precisions.values():
        assert found.lines["bits"] == "plain from plain 0.00e+00, planned from plain 0.00e+00"
        assert int(found.lines["recomputed"].split()[0]) > 0
        for side in ("plain", "planned"):
            words = found.lines[f"peak, {side}"]
            predicted, measured = words.removeprefix("predicted ").split(", measured ")
            assert measured.partition(", budget")[0] == predicted, words


def test_page_names_versions_and_neither_host_nor_paths(gpu: ModuleType) -> None:
    page = report().to_markdown()
    assert "Nothing is wrong." in page
    assert {"## fp32", "## bf16", "## machine"} <= set(page.splitlines())
    assert f"| torch | {torch.__version__} |" in page
    assert "| device | Stand-in GPU |" in page
    assert socket.gethostname() not in page
    assert "/site-packages/" not in page
    assert json.loads(report().to_json())["ok"]


def test_error_of_a_training_is_on_the_page_and_the_command_fails(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examination, "_made", lambda *_: torch.empty(1 << 60, device="cuda"))
    monkeypatch.setattr(examination, "examine_gpu", lambda: examine_gpu(TINY))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--gpu", "--out", str(tmp_path / "page.md")])
    assert ended.value.code == 1
    page = (tmp_path / "page.md").read_text()
    assert "- WRONG: fp32: OutOfMemoryError" in page
    assert "- WRONG: bf16: OutOfMemoryError" in page
    assert page.strip() in capsys.readouterr().out


def test_gradients_of_another_model_are_wrong(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dropout draw other numbers under a plan, as a runtime would that does not restore the generator."""
    train = examination._train

    def drawing(size: SampleSize, *args: object) -> object:
        monkeypatch.setattr(torch, "manual_seed", lambda seed: seeded(seed + 100 * (len(args) == 4)))
        return train(size, *args)  # type: ignore[arg-type]

    seeded = torch.manual_seed
    monkeypatch.setattr(examination, "_train", drawing)
    (wrong,) = examination._compare(TINY, "fp32", torch.device("cuda", 0)).wrong
    assert wrong.startswith("planned gradients differ from plain ones: plain from plain 0.00e+00")


def test_distance_is_zero_only_if_all_bits_are_equal() -> None:
    def trained(*numbers: float) -> TrainedSample:
        return TrainedSample(0, 0.0, 0.0, {"w": torch.tensor(numbers)})

    assert examination._distance(trained(1.0, 2.0), trained(1.0, 2.0)) == 0.0
    assert examination._distance(trained(3.0, 4.0), trained(3.0, 5.0)) == pytest.approx(0.2)
    assert examination._distance(trained(1.0), trained(float("nan"))) == math.inf


def test_error_in_words_has_no_paths_and_no_host() -> None:
    try:
        raise FileNotFoundError(2, f"no file on {socket.gethostname()}", "/home/somebody/secret/data.bin")
    except FileNotFoundError as error:
        text = error_in_words(error)
    assert "data.bin" in text
    assert "test_examine_gpu.py:" in text
    assert not any(word in text for word in ("somebody", "secret", socket.gethostname()))
    plain = "blocks.0/aten.mm.default#1: 3/4 of 10 MB/s, sha256/abc"
    assert redacted(plain) == plain


def test_model_of_the_doctor_has_dropout() -> None:
    assert any(isinstance(module, nn.Dropout) and module.p for module in SampleModel(TINY).modules())
