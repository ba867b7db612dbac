"""What feeding the loss does beside it: logs, resuming, several optimizers, and refusals."""

from __future__ import annotations

import importlib
import itertools
import json
import pickle
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from accelerate import Accelerator
from byhand import (
    DIVIDE_BY_SETTING,
    Case,
    Model,
    batches,
    by_hand,
    distance,
    optimizer_of,
    samples,
    windows,
)
from torch import nn

from ngn_kernels import NGNM, NGNMDv1, NGNMDv2, SkippedStepWarning
from ngn_kernels.trainers import FeedLoss, feed_loss
from ngn_kernels.trainers import huggingface as huggingface_module
from ngn_kernels.trainers import lightning as lightning_module

LIGHTNINGS = ["lightning.pytorch", "pytorch_lightning"]


@pytest.fixture(params=LIGHTNINGS)
def package(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def fit(package: Any, module: Any, *, resume: str | None = None, **options: Any) -> Any:
    """Train with FeedLoss, unless other callbacks are given."""
    trainer = runs.lightning_trainer(package, **{"callbacks": [FeedLoss()], **options})
    trainer.fit(module, runs.loader(), ckpt_path=resume)
    return trainer


def fed(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    """A Trainer of transformers with the line that feeds it."""
    optimizer = optimizer_of(model) if optimizer is None else optimizer
    return feed_loss(runs.hf_trainer(model, (optimizer, None), **options))


# Logs


def expected_telemetry() -> list[tuple[float, float]]:
    """shrink and step size after each step of the plain loop."""
    model = Model()
    optimizer = optimizer_of(model)
    found = []
    for (batch,) in windows(1):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step(loss=loss)
        found.append((float(optimizer.shrink), float(optimizer.step_sizes()[0])))
    return found


def test_transformers_logs() -> None:
    trainer, seen = fed(Model()), []
    trainer.callback_handler.callbacks.insert(0, runs_on_log(seen))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [log["ngn/shrink"] for log in seen if "loss" in log] == [
        log["ngn/shrink"] for log in logs
    ]
    for log, (shrink, size) in zip(logs, expected_telemetry(), strict=True):
        assert log["ngn/shrink"] == pytest.approx(shrink, abs=1e-5)
        assert log["ngn/step_size"] == pytest.approx(size, abs=1e-5)
        assert log["ngn/skipped_steps"] == 0
    json.dumps(logs)
    assert not any("ngn/shrink" in log for log in trainer.state.log_history if "loss" not in log)


def runs_on_log(seen: list[Any]) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    return Watch()


def test_lightning_logs(package: Any, tmp_path: Path) -> None:
    logger = importlib.import_module(f"{package.__name__}.loggers").CSVLogger(tmp_path)
    fit(package, runs.lightning_module(package, Case()), logger=logger, log_every_n_steps=1)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    header = rows[0].split(",")
    for row, (shrink, size) in zip(rows[1:], expected_telemetry(), strict=True):
        log = dict(zip(header, row.split(","), strict=True))
        assert float(log["ngn/shrink"]) == pytest.approx(shrink, abs=1e-5)
        assert float(log["ngn/step_size"]) == pytest.approx(size, abs=1e-5)
        assert float(log["ngn/skipped_steps"]) == 0


def test_coordinate_rules_have_no_shrink_to_log() -> None:
    model = Model()
    trainer = fed(model, NGNMDv2(model.parameters()), max_steps=2)
    trainer.train()
    log = trainer.state.log_history[0]
    assert "ngn/skipped_steps" in log and "ngn/shrink" not in log


@pytest.mark.parametrize("clipping", [None, 0.5])
def test_the_norm_is_logged_where_it_is_known(clipping: float | None) -> None:
    model = Model()
    optimizer = NGNMDv1(model.parameters(), max_grad_norm=clipping)
    norms: list[float] = []

    def note(*_: Any) -> None:
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))

    optimizer.register_step_pre_hook(note)
    options = {"max_steps": 2, "max_grad_norm": 0.0}  # the trainer's own clipping would come first
    trainer = feed_loss(runs.hf_trainer(model, (optimizer, None), **options))
    trainer.train()
    logged = [log["ngn/grad_norm"] for log in trainer.state.log_history if "ngn/grad_norm" in log]
    assert logged == (pytest.approx(norms, rel=1e-5) if clipping else [])


def test_several_groups_are_logged_by_number() -> None:
    model = Model()
    groups = [
        {"params": model.embed.parameters(), "lr": 0.1},
        {"params": [*model.hidden.parameters(), *model.head.parameters()], "lr": 0.01},
    ]
    trainer = fed(model, NGNMDv1(groups), max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["ngn/step_size"] == pytest.approx(0.1 * log["ngn/shrink"])
    assert log["ngn/step_size/1"] == pytest.approx(0.01 * log["ngn/shrink"])


# Resuming


def hf_resumed(optimizer_class: Any) -> tuple[nn.Module, nn.Module]:
    options = {"gradient_accumulation_steps": 4, "save_strategy": "steps", "save_steps": 2}
    options |= {"lr_scheduler_type": "linear"}
    whole, half = Model(), Model()
    for model, resume in ((whole, None), (half, "out/checkpoint-2")):
        optimizer = optimizer_class(model.parameters(), lr=0.05)
        trainer = runs.hf_trainer(model, (optimizer, None), **options)
        if optimizer_class is NGNMDv1:
            feed_loss(trainer)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == 6
    return whole, half


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, NGNMDv1], ids=["AdamW", "NGNMDv1"])
def test_transformers_resumes_bit_for_bit(optimizer: Any) -> None:
    whole, half = hf_resumed(optimizer)
    assert distance(whole, Model()) > 0.05
    assert distance(whole, half) == 0.0


def test_lightning_resumes_bit_for_bit(package: Any, tmp_path: Path) -> None:
    saved = str(tmp_path / "half.ckpt")

    def train(epochs: int, resume: str | None = None) -> Any:
        module = runs.lightning_module(package, Case(accumulate=4, schedule=True))
        options = {"accumulate_grad_batches": 4, "max_epochs": epochs}
        trainer = fit(package, module, resume=resume, **options)
        if epochs == 1:
            trainer.save_checkpoint(saved)
        return module.net

    whole = train(2)
    train(1)
    resumed = train(2, saved)
    assert distance(whole, Model()) > 0.05
    assert distance(whole, resumed) == 0.0


def test_accelerate_resumes_bit_for_bit() -> None:
    def train(epochs: int, load: bool = False, save: bool = False) -> nn.Module:
        accelerator = feed_loss(Accelerator(cpu=True, gradient_accumulation_steps=4))
        net = Model()
        model, optimizer, data = accelerator.prepare(net, optimizer_of(net), runs.loader())
        if load:
            accelerator.load_state("state")
        for batch in itertools.chain.from_iterable(data for _ in range(epochs)):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        if save:
            accelerator.save_state("state")
        return net

    whole = train(2)
    train(1, save=True)
    assert distance(whole, train(1, load=True)) == 0.0


# Several optimizers


class Adversaries(nn.Module):
    """A generator and a discriminator whose losses are never negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.made = nn.Linear(4, 4)
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def optimizers(self) -> list[Any]:
        return [NGNM(part.parameters(), lr=0.5) for part in (self.judge, self.made)]

    def judge_loss(self, real: Any) -> Any:
        fake = self.made(torch.ones_like(real)).detach()
        return (self.judge(real) - 1).square().mean() + self.judge(fake).square().mean()

    def made_loss(self, real: Any) -> Any:
        """Its backward() reaches the judge's parameters too."""
        return (self.judge(self.made(torch.ones_like(real))) - 1).square().mean()


REAL = [torch.randn(6, 4, generator=torch.Generator().manual_seed(k)) for k in range(8)]


def adversaries(
    backward: Any, optimizers: Any, net: Adversaries, real: Any, together: bool, clear: Any
) -> None:
    """One iteration."""
    judge, made = optimizers
    if together:
        backward(net.made_loss(real))
        judge.step()
        made.step()
        return
    parts = ((judge, net.judge, net.judge_loss), (made, net.made, net.made_loss))
    for optimizer, part, loss_of in parts:
        clear(part) if clear else optimizer.zero_grad()
        backward(loss_of(real))
        optimizer.step()


def adversaries_by_hand() -> nn.Module:
    net = Adversaries()
    judge, made = net.optimizers()
    for real in REAL:
        for optimizer, loss_of in ((judge, net.judge_loss), (made, net.made_loss)):
            optimizer.zero_grad()
            loss = loss_of(real)
            loss.backward()
            optimizer.step(loss=loss)
    return net


def lightning_adversaries(name: str, together: bool = False, clear: Any = None) -> nn.Module:
    package = importlib.import_module(name)

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = Adversaries()

        def training_step(self, real: Any, _: int) -> None:
            optimizers = self.optimizers()
            adversaries(self.manual_backward, optimizers, self.net, real, together, clear)

        def configure_optimizers(self) -> Any:
            return self.net.optimizers()

    module = Module()
    trainer = runs.lightning_trainer(package, callbacks=[FeedLoss()], max_epochs=1)
    trainer.fit(module, torch.utils.data.DataLoader(REAL, batch_size=None))  # type: ignore[arg-type]
    assert {"ngn/0/shrink", "ngn/1/shrink"} <= set(trainer.callback_metrics)
    return module.net


def accelerate_adversaries(together: bool = False, clear: Any = None) -> nn.Module:
    accelerator = feed_loss(Accelerator(cpu=True))
    net = Adversaries()
    optimizers = accelerator.prepare(*net.optimizers())
    for real in REAL:
        adversaries(accelerator.backward, optimizers, net, real, together, clear)
    return net


ADVERSARIES = {
    "lightning": partial(lightning_adversaries, "lightning.pytorch"),
    "pytorch_lightning": partial(lightning_adversaries, "pytorch_lightning"),
    "accelerate": accelerate_adversaries,
}


@pytest.mark.parametrize("run", ADVERSARIES.values(), ids=ADVERSARIES)
def test_each_optimizer_gets_its_own_loss(run: Any) -> None:
    expected = adversaries_by_hand()
    assert distance(expected, Adversaries()) > 0.05
    assert distance(run(), expected) <= 1e-6


@pytest.mark.parametrize("run", ADVERSARIES.values(), ids=ADVERSARIES)
def test_two_optimizers_do_not_step_on_one_loss(run: Any) -> None:
    with pytest.raises(RuntimeError, match=r"both step on it.*two\s+parameter groups"):
        run(together=True)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("run", ADVERSARIES.values(), ids=ADVERSARIES)
def test_adversaries_whose_modules_clear_their_gradients(run: Any, set_to_none: bool) -> None:
    """The generator's backward() reaches the judge, whose optimizer does not see the clearing."""
    net = run(clear=lambda part: part.zero_grad(set_to_none=set_to_none))
    assert distance(net, adversaries_by_hand()) <= 1e-6


# Batches that are thrown away


def interrupt(model: nn.Module, forward: int, error: BaseException) -> None:
    """Once, in the given forward()."""
    calls = []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == forward:
            raise error

    model.register_forward_pre_hook(hook)


OF_FOUR = {"gradient_accumulation_steps": 4, "max_steps": 5}


@pytest.mark.parametrize("forward", [2, 4, 7])
def test_transformers_finds_a_batch_size(forward: int) -> None:
    """After an out-of-memory error it begins again and clears the model's gradients by itself."""
    model, expected = Model(), Model()
    interrupt(model, forward, RuntimeError("CUDA out of memory."))
    trainer = fed(model, auto_find_batch_size=True, **OF_FOUR)
    trainer.train()
    assert trainer.state.train_batch_size == 1

    optimizer = optimizer_of(expected)
    if forward == 7:  # a step of four batches of two was made before
        fed(expected, optimizer, **OF_FOUR | {"max_steps": 1}).train()
    fed(expected, optimizer, per_device_train_batch_size=1, **OF_FOUR).train()
    assert distance(expected, Model()) > 0.05
    assert distance(model, expected) == 0.0
    if forward < 5:
        (first, *_) = (log for log in trainer.state.log_history if "ngn/shrink" in log)
        assert first["ngn/shrink"] == pytest.approx(shrink_of_a_step_of_ones(), abs=1e-6)


def shrink_of_a_step_of_ones() -> float:
    """Of the plain loop: one step of four batches of one."""
    model = Model()
    optimizer, whole = optimizer_of(model), 0.0
    for row in samples()[:4]:
        loss = model(**{name: row[name][None] for name in row})["loss"] / 4
        loss.backward()
        whole += loss.item()
    optimizer.step(loss=whole)
    return float(optimizer.shrink)


@pytest.mark.parametrize("forward", [2, 4, 7])
def test_transformers_is_interrupted_and_trains_again(forward: int) -> None:
    model, expected = Model(), Model()
    interrupt(model, forward, KeyboardInterrupt())
    trainer = fed(model, **OF_FOUR)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    optimizer = optimizer_of(expected)
    if forward == 7:
        fed(expected, optimizer, **OF_FOUR | {"max_steps": 1}).train()
    fed(expected, optimizer, **OF_FOUR).train()
    assert distance(expected, Model()) > 0.05
    assert distance(model, expected) == 0.0


def test_lightning_is_interrupted_and_fits_again(package: Any) -> None:
    """The second fit() goes on with the same optimizer."""
    module = runs.lightning_module(package, Case())
    optimizer = optimizer_of(module.net)
    type(module).configure_optimizers = lambda self: optimizer
    interrupt(module.net, 3, ValueError("stop"))
    options = {"accumulate_grad_batches": 4, "max_epochs": 1}
    with pytest.raises(ValueError, match="stop"):
        fit(package, module, **options)
    module.net.zero_grad()
    fit(package, module, **options)
    expected = runs.lightning_module(package, Case())
    fit(package, expected, **options)
    assert distance(module.net, expected.net) == 0.0


# Losses that the user gives besides


def test_a_loss_of_the_users_own_is_added() -> None:
    """With a backward() of its own, before the accelerator's."""
    accelerator = feed_loss(Accelerator(cpu=True))
    original, expected = Model(), Model()
    optimizer, plain = optimizer_of(original), optimizer_of(expected)
    model, wrapped = accelerator.prepare(original, optimizer)
    for batch in batches()[:3]:
        decay = sum(p.square().sum() for p in model.parameters())
        decay.backward()
        optimizer.add_loss(decay)
        accelerator.backward(model(**batch)["loss"])
        wrapped.step()
        wrapped.zero_grad()
        plain.zero_grad()
        loss = expected(**batch)["loss"] + sum(p.square().sum() for p in expected.parameters())
        loss.backward()
        plain.step(loss=loss)
    assert distance(original, expected) <= 1e-6


def test_manual_optimization_that_passes_the_loss(package: Any) -> None:
    module = runs.manual_module(package, Case())

    def training_step(self: Any, batch: Any, _: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.net(**batch)["loss"]
        self.manual_backward(loss)
        optimizer.step(loss=loss)

    type(module).training_step = training_step
    fit(package, module, callbacks=[])
    assert distance(module.net, by_hand(Case(), DIVIDE_BY_SETTING)) <= 1e-6


# Steps that are left out


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_step_that_returns_none(package: Any, accumulate: int) -> None:
    module = runs.lightning_module(package, Case())
    step = type(module).training_step
    type(module).training_step = lambda self, batch, k: (
        None if k in (2, 3, 5) else step(self, batch, k)
    )
    fit(package, module, accumulate_grad_batches=accumulate, max_epochs=1)

    expected = Model()
    optimizer = optimizer_of(expected)
    for first in range(0, 10, accumulate):
        used = [k for k in range(first, first + accumulate) if k not in (2, 3, 5)]
        optimizer.zero_grad()
        for k in used:
            loss = expected(**batches()[k])["loss"] / accumulate
            loss.backward()
            optimizer.add_loss(loss)
        if used:
            optimizer.step()
    assert distance(module.net, expected) <= 1e-6


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_module_that_clears_by_itself(accumulate: int) -> None:
    """The optimizer sees neither the step that the scaler leaves out nor the clearing."""
    case = Case(accumulate=accumulate, overflow=3, clip=0.05)

    def make(package: Any, case: Case) -> Any:
        module = runs.lightning_module(package, case)
        type(module).optimizer_zero_grad = lambda self, *_: self.net.zero_grad()
        return module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedStepWarning)
        expected = by_hand(case, DIVIDE_BY_SETTING)
    assert distance(runs.lightning(case, make=make), expected) <= 1e-5


def test_a_flag_that_was_switched_off_comes_back(package: Any) -> None:
    options = {"precision": "bf16-mixed", "gradient_clip_val": 1.0, "max_steps": 1}
    trainer = fit(package, runs.lightning_module(package, Case()), **options)
    (optimizer,) = trainer.optimizers
    assert optimizer._step_supports_amp_scaling is True


def test_manual_optimization_that_clips_under_bf16(package: Any) -> None:
    """By the wrapper that self.optimizers() returns, which has a class attribute of its own."""
    case = Case(bf16=True, clip=0.05)
    module = runs.manual_module(package, case)
    trainer = fit(package, module, precision="bf16-mixed")
    assert distance(module.net, by_hand(case, DIVIDE_BY_SETTING)) <= 1e-5
    for optimizer in (*trainer.optimizers, module.optimizers()):
        assert optimizer._step_supports_amp_scaling is True


def test_a_module_that_clips_by_itself(package: Any) -> None:
    module = runs.lightning_module(package, Case())
    type(module).configure_gradient_clipping = lambda self, optimizer, *_, **__: (
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
    )
    fit(package, module, precision="bf16-mixed")
    expected = by_hand(Case(bf16=True, clip=0.05), lambda *_: 1)
    assert distance(module.net, expected) <= 1e-5


# Options that are set on what the trainer hands out


def test_options_reach_the_optimizer_through_lightnings_wrapper(package: Any) -> None:
    module = runs.lightning_module(package, Case())
    step = module.training_step

    def aiming_higher(*batch: Any) -> Any:
        module.optimizers().loss_target = 0.5
        return step(*batch)

    module.training_step = aiming_higher
    trainer = fit(package, module)
    assert trainer.optimizers[0].loss_target == 0.5


# What is refused, and what is said


def test_owners_that_are_none(package: Any) -> None:
    model = Model()
    for owner in (None, model, optimizer_of(model), runs.lightning_trainer(package)):
        with pytest.raises(TypeError, match=r"FeedLoss\(\).*step\(loss=loss\)"):
            feed_loss(owner)


def test_feeding_twice(package: Any) -> None:
    accelerator = feed_loss(Accelerator(cpu=True))
    with pytest.raises(RuntimeError, match="twice"):
        feed_loss(accelerator)
    trainer = fed(Model())
    for owner in (trainer, trainer.accelerator):
        with pytest.raises(RuntimeError, match="twice"):
            feed_loss(owner)
    with pytest.raises(RuntimeError, match="more than one FeedLoss"):
        module = runs.lightning_module(package, Case())
        fit(package, module, callbacks=[FeedLoss(), FeedLoss()])


def test_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    trainer = runs.hf_trainer(model, (optimizer_of(model), None))
    monkeypatch.setattr("transformers.__version__", "4.45.2")
    with pytest.raises(RuntimeError, match=r"transformers 4\.45\.2 is too old.*transformers>="):
        feed_loss(trainer)
    monkeypatch.setattr("accelerate.__version__", "0.34.0")
    with pytest.raises(RuntimeError, match=r"accelerate 0\.34\.0 is too old.*accelerate>="):
        feed_loss(Accelerator(cpu=True))
    lightning_module._callback_class.cache_clear()
    for name in LIGHTNINGS:
        importlib.import_module(name)
    monkeypatch.setattr("lightning.pytorch.__version__", "1.9.5")
    with pytest.raises(RuntimeError, match=r"lightning.* 1\.9\.5 is too old.*>="):
        FeedLoss()


@pytest.mark.parametrize(
    ("kind", "fsdp_version", "says"),
    [
        ("DEEPSPEED", 0, "DeepSpeed"),
        ("MEGATRON_LM", 0, "Megatron"),
        ("FSDP", 1, "FSDP 1"),
        ("FSDP", 2, None),
        ("MULTI_GPU", 0, None),
    ],
)
def test_shards_behind_the_optimizer_are_refused(
    kind: str, fsdp_version: int, says: str | None
) -> None:
    plugin = SimpleNamespace(fsdp_version=fsdp_version)
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind), state=SimpleNamespace(fsdp_plugin=plugin)
    )
    if says is None:
        huggingface_module._refuse_shards(accelerator)
        return
    with pytest.raises(RuntimeError, match=f"{says}.*FSDP2"):
        huggingface_module._refuse_shards(accelerator)


def test_lightning_strategies_that_shard_are_refused(package: Any) -> None:
    strategies = importlib.import_module(f"{package.__name__}.strategies")
    for strategy in (strategies.FSDPStrategy, strategies.DeepSpeedStrategy):
        trainer = SimpleNamespace(callbacks=[], strategy=object.__new__(strategy))
        with pytest.raises(RuntimeError, match=f"{strategy.__name__}.*FSDP2"):
            FeedLoss().setup(trainer, None, "fit")
    trainer = SimpleNamespace(callbacks=[], strategy=object.__new__(strategies.DDPStrategy))
    FeedLoss().setup(trainer, None, "fit")


def test_policy_gradients_are_refused_without_a_floor() -> None:
    import transformers

    class GRPOTrainer(transformers.Trainer):
        pass

    def trainer(**options: Any) -> Any:
        model = Model()
        optimizers = (optimizer_of(model, **options), None)
        arguments = runs.hf_arguments(max_steps=1)
        return GRPOTrainer(model, arguments, train_dataset=samples(), optimizers=optimizers)

    with pytest.raises(RuntimeError, match=r"GRPOTrainer takes both signs.*AdamW.*loss_floor="):
        feed_loss(trainer())
    feed_loss(trainer(loss_floor=-10.0)).train()
    late = GRPOTrainer(
        Model(),
        runs.hf_arguments(max_steps=1),
        train_dataset=samples(),
        optimizer_cls_and_kwargs=(NGNMDv1, {"lr": 0.1}),
    )
    with pytest.raises(RuntimeError, match="takes both signs"):
        feed_loss(late).train()


def test_trl_has_the_trainers_that_are_refused() -> None:
    trl = importlib.import_module("trl")
    assert {name for name in huggingface_module.POLICY_GRADIENTS if hasattr(trl, name)} == {
        "GRPOTrainer",
        "RLOOTrainer",
    }


def test_no_loss_to_feed() -> None:
    accelerator = feed_loss(Accelerator(cpu=True))
    model = Model()
    optimizer = accelerator.prepare(optimizer_of(model))
    with pytest.raises(TypeError, match=r"NoneType.*labels"):
        accelerator.backward(model(batches()[0]["input_ids"]).get("loss"))
    accelerator.backward(model(**batches()[0])["loss"])
    optimizer.step()
    unlabelled = [{"input_ids": row["input_ids"]} for row in samples()]
    with pytest.raises(ValueError, match="did not return a loss"):
        fed(model, data=unlabelled).train()


def test_no_ngn_optimizer_to_feed(package: Any) -> None:
    model = Model()
    accelerator = feed_loss(Accelerator(cpu=True))
    with pytest.raises(RuntimeError, match=r"found no NGN optimizer.*prepare"):
        accelerator.backward(model(**batches()[0])["loss"])
    module = runs.lightning_module(package, Case())
    type(module).configure_optimizers = lambda self: torch.optim.AdamW(self.parameters())
    with pytest.raises(RuntimeError, match=r"found no NGN optimizer.*configure_optimizers"):
        fit(package, module)


def test_lightning_says_which_line_to_write(package: Any) -> None:
    """Its closure returns the loss of the last micro-batch."""
    module = runs.lightning_module(package, Case())
    with pytest.raises(RuntimeError, match=r"^7 backward\(\).*callbacks=\[.*FeedLoss\(\)\]"):
        fit(package, module, callbacks=[], accumulate_grad_batches=8)
    assert distance(module.net, Model()) == 0.0, "not one step was taken"
    module = runs.lightning_module(package, Case())
    fit(package, module, accumulate_grad_batches=8)
    assert distance(module.net, by_hand(Case(8), DIVIDE_BY_SETTING)) <= 1e-6


def test_lightning_without_accumulation_needs_no_line(package: Any) -> None:
    module = runs.lightning_module(package, Case())
    fit(package, module, callbacks=[], precision="bf16-mixed")
    assert distance(module.net, by_hand(Case(bf16=True), DIVIDE_BY_SETTING)) <= 1e-6


def test_lightning_with_a_scaler_says_which_line_to_write(package: Any) -> None:
    """Its plugin runs the closure itself and calls a bare step()."""
    precision = importlib.import_module(f"{package.__name__}.plugins.precision")
    module = runs.lightning_module(package, Case())
    with pytest.raises(RuntimeError, match=r"callbacks=\[.*FeedLoss\(\)\]"):
        fit(package, module, callbacks=[], plugins=[runs.Unrounded(precision)])


def test_accelerate_says_which_line_to_write() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net := Model(), optimizer_of(net))
    accelerator.backward(model(**batches()[0])["loss"])
    with pytest.raises(RuntimeError, match=r"feed_loss\(trainer\)"):
        optimizer.step()


def test_manual_optimization_and_fabric_say_which_line_to_write(package: Any) -> None:
    from lightning.fabric import Fabric

    module = runs.manual_module(package, Case())
    with pytest.raises(RuntimeError, match=r"callbacks=\[.*FeedLoss\(\)\]"):
        fit(package, module, callbacks=[])
    model, optimizer = (fabric := Fabric(accelerator="cpu")).setup(
        net := Model(), optimizer_of(net)
    )
    fabric.backward(model(**batches()[0])["loss"])
    with pytest.raises(RuntimeError, match=r"optimizer\.add_loss\(share\)"):
        optimizer.step()


@pytest.mark.parametrize("says", [r"feed_loss\(trainer\)", r"callbacks=\[.*FeedLoss\(\)\]"])
def test_a_trainer_without_the_line_is_told_of_it(says: str) -> None:
    model = Model()
    with pytest.raises(RuntimeError, match=says):
        runs.hf_trainer(model, (optimizer_of(model), None)).train()


def test_the_callback_is_one_of_both_packages_and_can_be_pickled() -> None:
    callback = FeedLoss()
    for name in LIGHTNINGS:
        assert isinstance(callback, importlib.import_module(name).Callback)
    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)


def test_no_trainer_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, ngn_kernels.trainers\n"
        "print({'transformers', 'accelerate', 'lightning', 'pytorch_lightning'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_new_accelerator_of_a_trainer_is_fed_too() -> None:
    """A hyper-parameter search makes one for each trial."""
    trainer = fed(model := Model())
    trainer.create_accelerator_and_postprocess()
    trainer.train()
    assert distance(model, by_hand(Case(), lambda *_: 1)) <= 1e-6


# TRL


def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{k}": k for k in range(30)} | {"<pad>": 30, "<eos>": 31}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w0"
    )


def tiny_gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=31,
        eos_token_id=31, pad_token_id=30, **no_dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_trl_ends_where_the_loop_ends(accumulate: int) -> None:
    """With NGN-M: a preconditioner would blow the rounding of TRL's own head up to a step size."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"input_ids": [(3 * k + j) % 30 for j in range(4 + k % 5)]} for k in range(20)]

    class Ordered(SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = tiny_gpt()
    arguments = runs.hf_arguments().to_dict()
    wanted = ("output_dir", "use_cpu", "per_device_train_batch_size", "num_train_epochs")
    wanted = (*wanted, "max_grad_norm", "lr_scheduler_type", "report_to", "disable_tqdm")
    config = SFTConfig(
        **{name: arguments[name] for name in wanted},
        gradient_accumulation_steps=accumulate,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
    )
    trainer = Ordered(
        model,
        config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        optimizers=(NGNM(model.parameters(), lr=1.0), None),
    )
    feed_loss(trainer).train()
    assert "ngn/shrink" in trainer.state.log_history[0]

    expected = tiny_gpt()
    optimizer = NGNM(expected.parameters(), lr=1.0)
    micro = [trainer.data_collator([rows[k], rows[k + 1]]) for k in range(0, 20, 2)]
    for first in [*range(0, 10, accumulate)] * 2:
        window = micro[first : first + accumulate]
        items = sum(int(batch["labels"].ne(-100).sum()) for batch in window)
        optimizer.zero_grad()
        for batch in window:
            loss = expected(**batch, num_items_in_batch=items).loss
            loss.backward()
            optimizer.add_loss(loss)
        optimizer.step()
    assert distance(expected, tiny_gpt()) > 0.05
    assert distance(model, expected) <= 1e-6
