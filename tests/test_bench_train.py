"""`ngn-bench train` on small models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_runs import CPU, run


@pytest.mark.parametrize("clip", [None, "1.0"])
def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str], clip: str | None) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    path, picture = tmp_path / "train.json", tmp_path / "train.png"
    command = ["train", "--model", "small-transformer", "--text", str(text), "--batch", "2"]
    command += ["--context", "8", "--optimizers", "ngnmdv1,ngnmdv1:plain", "--seconds", "0.3"]
    command += ["--json", str(path), "--plot", str(picture), "--device", "cpu"]
    assert run(command + ([] if clip is None else ["--clip", clip])) == 0
    record = json.loads(path.read_text())
    assert record["kind"] == "train"
    assert record["rows"][0]["contender"] == "adamw:fused"
    assert len(record["rows"]) == 3
    for row in record["rows"]:
        assert 0 < row["update"] < row["time"]["median"]
        assert row["last_loss"] < row["first_loss"]
        assert row["ratio"] > 0
    assert picture.stat().st_size > 10_000
    output = capsys.readouterr().out
    assert "2 × 8 tokens, bytes of text" in output
    assert "time/update" in output


def test_train_on_images(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    command = ["train", "--model", "mlp", "--batch", "4", "--seconds", "0.1", "--json", str(path)]
    assert run([*command, "--device", "cpu"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["workload"] for row in rows] == ["mlp", "mlp"]
    assert rows[0]["parameters"] == 89610


def test_train_sizes_the_batch_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from ngn_bench import train

    settings = train.TrainSettings(CPU, 1.0)
    monkeypatch.setattr(train, "_matmul_speed", lambda settings: 1e11)
    assert train._fit_machine("transformer++-70m", settings) == (1, 256)
    monkeypatch.setattr(train, "_matmul_speed", lambda settings: 1e14)
    assert train._fit_machine("transformer++-70m", settings) == (180, 2048)
