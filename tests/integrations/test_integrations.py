"""The code of docs/integrations.md, with the packages themselves."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ngn_kernels import NGNMDv1

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
SCRIPTS = {
    section.splitlines()[0]: script
    for section in PAGE.split("\n## ")[1:]
    for script in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
}


def run(title: str) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(SCRIPTS[title], title, "exec", dont_inherit=True), names)
    return names


@pytest.fixture
def timm_optim(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """timm.optim by itself: the rest of timm needs torchvision."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None
    package, models = ModuleType("timm"), ModuleType("timm.models")
    package.__path__ = list(spec.submodule_search_locations or [])
    models.group_parameters = None  # type: ignore[attr-defined]  # for layer decay only
    monkeypatch.setitem(sys.modules, "timm", package)
    monkeypatch.setitem(sys.modules, "timm.models", models)
    yield
    for name in [name for name in sys.modules if name.startswith("timm.")]:
        monkeypatch.delitem(sys.modules, name)


def test_the_versions_are_those_that_are_tested() -> None:
    pinned = (Path(__file__).parent / "packages.txt").read_text("utf-8")
    for name, shown in (("timm", "timm"), ("litgpt", "LitGPT"), ("torchtitan", "torchtitan")):
        version = metadata.version(name)
        assert f"\n{name}=={version}\n" in pinned
        assert f"| [{shown}](#{name}) {version} |" in PAGE
    version = metadata.version("pytorch_optimizer")
    assert f"| [pytorch_optimizer](#pytorch_optimizer) {version} |" in PAGE


def test_timm(timm_optim: None) -> None:
    names = run("timm")
    optimizer = names["optimizer"]
    assert type(optimizer) is NGNMDv1
    assert optimizer.decay_form == "adamw" and optimizer.loss_target == 0.2
    decays = {group["weight_decay"]: len(group["params"]) for group in optimizer.param_groups}
    assert decays == {0.0: 2, 0.05: 2}
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["optimizer"].shrink < 1


def test_pytorch_optimizer() -> None:
    names = run("pytorch_optimizer")
    optimizer = names["optimizer"]
    assert type(optimizer) is NGNMDv1 and optimizer.decay_form == "adamw"
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.05]
    assert names["losses"][-1] < 0.5 * names["losses"][0]

    lookahead = names["create_optimizer"](names["model"], "ngnmdv1", lr=1e-2, use_lookahead=True)
    for _ in range(7):  # its slow weights move at every fifth step
        loss = nn.functional.mse_loss(names["model"](names["inputs"]), names["inputs"][:, :1])
        lookahead.zero_grad()
        loss.backward()
        assert lookahead.step(lambda loss=loss: loss) is loss


def test_litgpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own pretraining loop, with accumulation, takes the steps of a loop by hand."""
    import lightning
    from litgpt import Config, pretrain
    from litgpt.args import EvalArgs, LogArgs, TrainArgs

    (tmp_path / "ngn_litgpt.py").write_text(SCRIPTS["LitGPT"], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lightning.Fabric, "backward", lightning.Fabric.backward)  # put back later
    monkeypatch.setattr(torch, "compile", lambda model: model)
    tokens = torch.randint(8, (24, 9), generator=torch.Generator().manual_seed(0))
    loaders = [DataLoader(tokens, batch_size=2), DataLoader(tokens[:2], batch_size=2)]
    monkeypatch.setattr(pretrain, "get_dataloaders", lambda *_: loaders)

    seen: dict[str, Any] = {"losses": [], "lrs": [], "shrinks": []}
    make = pretrain.instantiate_torch_optimizer

    def make_and_watch(optimizer: Any, params: Any, **options: Any) -> Any:
        params = list(params)
        seen["start"] = [param.detach().clone() for param in params]
        seen["params"], seen["made"] = params, make(optimizer, params, **options)
        seen["made"].register_step_post_hook(
            lambda made, *_: seen["shrinks"].append(float(made.shrink))
        )
        return seen["made"]

    monkeypatch.setattr(pretrain, "instantiate_torch_optimizer", make_and_watch)
    saved: dict[str, Any] = {}
    monkeypatch.setattr(
        pretrain, "save_checkpoint", lambda fabric, state, *_: saved.update(model=state["model"])
    )
    options = {"lr": 1e-2, "loss_target": 0.5}
    config = Config(
        block_size=8, n_layer=1, n_embd=8, n_head=2, padded_vocab_size=8, vocab_size=8, name="tiny"
    )
    pretrain.setup(
        "tiny", model_config=config, out_dir=tmp_path / "out", precision="32-true", devices=1,
        data=object(), logger_name="csv", log=LogArgs(),
        optimizer={"class_path": "ngn_litgpt.NGNMDv1", "init_args": dict(options)},
        train=TrainArgs(
            save_interval=None, log_interval=1, global_batch_size=4, micro_batch_size=2,
            max_tokens=6 * 4 * 8, max_norm=1.0, min_lr=1e-2, lr_warmup_steps=0,
        ),
        eval=EvalArgs(interval=1000, max_iters=1),
    )  # fmt: skip
    made = seen["made"]
    assert isinstance(made, NGNMDv1) and type(made).__module__ == "ngn_litgpt"
    assert len(seen["shrinks"]) == 6 and all(0 < shrink < 1 for shrink in seen["shrinks"])

    model = deepcopy(saved["model"]._forward_module)
    with torch.no_grad():
        for param, start in zip(model.parameters(), seen["start"], strict=True):
            param.copy_(start)
    by_hand = NGNMDv1(model.parameters(), **options)
    shrinks = []
    for rows in tokens.split(4):
        total = 0.0
        for part in rows.split(2):
            logits = model(part[:, :8])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / 2
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        by_hand.step(loss=total)
        by_hand.zero_grad()
        shrinks.append(float(by_hand.shrink))
    torch.testing.assert_close(seen["shrinks"], shrinks, rtol=1e-4, atol=0)
    for param, other in zip(seen["params"], model.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-6)


@pytest.fixture
def titan() -> dict[str, Any]:
    return run("torchtitan")


def container(titan: dict[str, Any], model: nn.Module) -> Any:
    from torchtitan.components.optimizer import ParamGroupConfig

    groups = [
        ParamGroupConfig(
            pattern=pattern,
            optimizer_name="NGNMDv1",
            optimizer_kwargs={"lr": 1e-2, "weight_decay": decay},
        )
        for pattern, decay in ((r"\.bias$", 0.0), (r".*", 0.1))
    ]
    whole = {"NGNMDv1": {"loss_reduction": "sum", "decay_form": "adamw"}}
    config = titan["NGNContainer"].Config(
        param_groups=groups, optimizer_factory_kwargs_by_name=whole
    )
    return config.build(model_parts=[model])


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))


def train(optimizers: Any, model: nn.Module, steps: int) -> list[float]:
    """As torchtitan's train_step does it, with the loss of NGNTrainer; two micro-batches a step."""
    inputs = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        optimizers.zero_grad()
        for part in inputs.split(32):
            loss = nn.functional.mse_loss(model(part), part[:, :1].sin(), reduction="sum") / 64
            loss.backward()
            for optimizer in optimizers:
                optimizer.add_loss(loss.detach())
        optimizers.step()
        losses.append(loss.item())
    return losses


def test_torchtitan(titan: dict[str, Any]) -> None:
    model = small_model()
    optimizers = container(titan, model)
    (optimizer,) = optimizers
    assert type(optimizer) is NGNMDv1 and optimizer.loss_reduction == "sum"
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    losses = train(optimizers, model, 60)
    assert losses[-1] < 0.5 * losses[0]


def test_torchtitan_resumes(titan: dict[str, Any]) -> None:
    """State is created by a step at lr 0, which changes nothing, and a loaded run goes on."""
    model = small_model()
    optimizers = container(titan, model)
    before = deepcopy(model.state_dict())
    empty = optimizers.state_dict()
    assert any(key.endswith("exp_avg_sq") for key in empty)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    train(optimizers, model, 5)
    saved, weights = deepcopy(optimizers.state_dict()), deepcopy(model.state_dict())
    train(optimizers, model, 5)

    resumed = small_model()
    resumed.load_state_dict(weights)
    others = container(titan, resumed)
    others.load_state_dict(saved)
    train(others, resumed, 5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])
