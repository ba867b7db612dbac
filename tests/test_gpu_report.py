"""`make gpu-report`: what it says without a GPU, and the whole of it tried on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ngn_bench.gpu import report

from ngn_kernels.backends import availability

TESTS = """
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2, "one is not two"
@pytest.mark.skip
def test_idle(): pass
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_would_have_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main(["--output", str(tmp_path / "report")]) == 0
    said = capsys.readouterr().out
    assert "There is no GPU here" in said
    for part in ("tests/test_gpu.py", "ngn-bench step", "first step", "Markdown page"):
        assert part in said
    assert not (tmp_path / "report").exists()


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a report on the CPU, with three tests and few tensors."""
    if availability()["cpu"] is not None:
        pytest.skip("there is no fused engine here")
    tests = tmp_path / "test_three.py"
    tests.write_text(TESTS)
    monkeypatch.setattr(report, "TESTS", tests)
    monkeypatch.setattr(report, "TENSORS", (2,))
    monkeypatch.setattr(report, "FORMS", ("ngnmdv1:{}",))
    arguments = ["--device", "cpu", "--workload", "one:64", "--seconds", "0.5"]
    return [*arguments, "--output", str(tmp_path / "report")]


def test_a_report(short: list[str], tmp_path: Path) -> None:
    """One file with everything, one page that shows it; a test that failed is named and is the status."""
    assert report.main(short) == 1
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert data["kind"] == "gpu-report" and data["engines"] == ["cpu"]
    counts = [data["tests"][name] for name in ("tests", "failures", "errors", "skipped")]
    assert counts == [3, 1, 0, 1]
    (first,) = data["first_steps"]
    assert first["engine"] == "cpu" and first["tensors"] == 2
    assert first["later"] > 0 and first["first"] > 0
    rows = data["steps"]["record"]["rows"]
    assert {row["contender"] for row in rows} >= {"adamw:fused", "ngnmdv1:cpu"}
    page = (tmp_path / "report" / "report.md").read_text()
    assert "1 passed, 1 failed, 1 skipped" in page and "test_bad`: " in page
    assert "one is not two" in page and "NGN-MDv1 · cpu" in page
    assert "projected" not in page, "nobody has published the bandwidth of this CPU"
    if (tmp_path / "report" / "report.png").exists():
        assert "(report.png)" in page


def test_what_cannot_run_is_in_the_report(
    short: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "TESTS", tmp_path / "test_nowhere.py")
    monkeypatch.setattr(report, "FORMS", ("ngnmdv9:{}",))
    monkeypatch.setattr(report, "engines", lambda device: ["triton"])
    assert report.main(short) == 1
    page = (tmp_path / "report" / "report.md").read_text()
    assert "is not installed; run this in a clone" in page
    assert "ngnmdv9" in page.split("## Steps")[1]
    assert "triton" in page.split("## First step")[1].split("## Steps")[0]


def test_times_are_projected_from_the_vendors_bandwidth(tmp_path: Path) -> None:
    row = {
        **{"workload": "w", "label": "NGN-MDv1 · cuda", "parameters": 10**9, "bytes_floor": 36.0},
        **{"ratio": 1.2, "share": 0.9, "time": {"median": 0.02, "device_median": 0.012}},
    }
    data = {
        **{"doctor": "", "peak": 3.0e12, "first_steps": [], "tests": {"ran": False, "why": "no"}},
        "steps": {"record": {"rows": [row]}},
    }
    page = report.page(data, tmp_path / "none.png")
    assert "| w | NGN-MDv1 · cuda | 12.0 ms | 1.20 | 90% | 12.0 ms |" in page


@pytest.mark.parametrize(
    ("properties", "peak"),
    [
        ({"memory_clock_rate": 1_215_000, "memory_bus_width": 5120}, 1.555e12),  # A100, 40 GB
        ({"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}, 3.352e12),  # H100 SXM
        ({}, None),
    ],
)
def test_the_peak_is_the_devices_own(
    properties: dict[str, int], peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name="NVIDIA something", **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.version, "hip", None)
    assert report.peak_of(torch.device("cuda")) == (peak and pytest.approx(peak, rel=1e-3))
    assert report.peak_of(torch.device("cpu")) is None
