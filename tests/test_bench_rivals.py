"""Other libraries' optimizers as contenders, missing and installed; the packages here are stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from bench_runs import CPU, Bench, run
from ngn_bench.contenders import check
from ngn_bench.contenders.registry import CONTENDERS, select
from ngn_bench.timing import step
from torch.testing._internal.two_tensor import TwoTensor

from ngn_kernels.backends import NAMES

RIVALS = {
    "adamw8bit:torchao": "torchao",
    "adamw8bit:bitsandbytes": "bitsandbytes",
    "adamw:deepspeed": "deepspeed",
}
EIGHT_BIT = "from torch.optim import AdamW\nclass AdamW8bit(AdamW): pass\n"
DEEPSPEED = """
from torch.optim import AdamW
class DeepSpeedCPUAdam(AdamW):
    def __init__(self, model_params, lr=1e-3, weight_decay=0):
        super().__init__(model_params, lr=lr, weight_decay=weight_decay)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of their names, whose optimizers are torch's."""
    forget(monkeypatch)
    for module, text in (
        ("torchao/optim", EIGHT_BIT),
        ("bitsandbytes/optim", EIGHT_BIT),
        ("deepspeed/ops/adam", DEEPSPEED),
    ):
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in RIVALS.values():
            monkeypatch.delitem(sys.modules, name)


def test_rivals_have_a_group_of_their_own() -> None:
    assert {name for name, contender in CONTENDERS.items() if contender.rival} == set(RIVALS)
    chosen = {contender.name for contender in select(["rivals"], "cpu")}
    assert chosen == {*RIVALS, "adamw:fused"}
    for group in ("all", "adamw", "torch-all"):
        assert not any(contender.rival for contender in select([group], "cpu"))


@pytest.mark.parametrize("package", RIVALS.values())
def test_a_missing_package_is_named(bench: Bench, package: str) -> None:
    bench.patch.setitem(sys.modules, package, None)
    name = next(name for name in RIVALS if RIVALS[name] == package)
    record = bench.step("--contenders", name)
    reason = f"{package} is not installed: pip install {package}"
    assert record["not_run"]["many:3x5"] == {CONTENDERS[name].label: reason}
    assert reason in bench.output()
    assert run(["step", "--list", "--device", "cpu"]) == 0
    line = next(line for line in bench.output().splitlines() if name in line)
    assert line.endswith(reason)


@pytest.mark.usefixtures("installed")
def test_rivals_are_timed(bench: Bench) -> None:
    rows = bench.rows("--workload", "one:8192", "--contenders", "rivals")
    assert set(rows) == {*RIVALS, "adamw:fused"}
    for name in RIVALS:
        assert rows[name]["time"] is not None, rows[name]["note"]
        known = name == "adamw:deepspeed"
        # Its weight decay would be another one if it were left to its default.
        assert rows[name]["verdict"]["ok"] is (True if known else None)
        assert rows[name]["bytes_code"] == (28 if known else None)
    assert rows["adamw8bit:torchao"]["bytes_floor"] == 4 * 3 + 4 * (1 + 4 / 256)
    bench.captured()
    assert run(["step", "--list", "--device", "cpu"]) == 0
    lines = bench.output().splitlines()
    for name in RIVALS:
        assert next(line for line in lines if name in line).endswith(" yes")


@pytest.mark.usefixtures("installed")
def test_a_wrong_rival_is_found(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed" / "ops" / "adam.py"
    path.write_text(DEEPSPEED.replace("lr=lr", "lr=1.001 * lr"))
    assert check.check(CONTENDERS["adamw:deepspeed"], torch.float32, CPU).ok is False


def test_the_list_has_every_contender(bench: Bench) -> None:
    assert run(["step", "--list", "--device", "cpu"]) == 0
    lines = bench.output().splitlines()
    for name in CONTENDERS:
        rule, _, engine = name.rpartition(":")
        rule = rule if engine in NAMES else name
        assert sum(line.startswith(f"{rule} ") for line in lines) == 1, name
    row = next(line for line in lines if line.startswith("ngnmdv1 "))
    assert "reference" in row and " 36 " in row


def test_state_made_of_other_tensors_counts_their_bytes() -> None:
    """As torchao's, which has the shape and type of the numbers that it stands for."""
    param = torch.ones(100, requires_grad=True)
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.SGD([param], lr=0.1)
    codes = TwoTensor(torch.zeros(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8))
    optimizer.state[param] = {"exp_avg": codes, "exp_avg_sq": torch.zeros(100), "step": 3}
    assert step._state_bytes(optimizer) == 2 * 100 + 400
