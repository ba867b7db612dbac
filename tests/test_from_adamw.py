"""From torch's AdamW and back in the middle of a run, and what else its users look for."""

from __future__ import annotations

import copy
import inspect
import json
import threading
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from helpers import bits, params_of, random_gradients
from torch import nn
from torch.nn import Parameter
from torch.optim import Adam, AdamW

import ngn_kernels
from ngn_kernels import (
    NGN,
    NGND,
    NGNM,
    DecNGNMDv1,
    NGNMDv1,
    NGNMDv1W,
    NGNMDv2,
    NGNMuon,
    NGNOptimizer,
    SkippedStepError,
    SkippedStepWarning,
    groups,
    options,
)
from ngn_kernels.formats import ROUNDINGS, STATE_FORMATS
from ngn_kernels.rules import DECAY_FORMS, RULES

FAMILY = pytest.mark.parametrize("cls", [NGNMDv1, NGNMDv2, DecNGNMDv1, NGNMDv1W])
CLASSES = (NGN, NGNM, NGND, NGNMDv1, NGNMDv2, DecNGNMDv1, NGNMDv1W)


def new_params(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (5,), (3, 3))
    return [Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def trained_adamw(steps: int = 30, dtype: torch.dtype = torch.float32, **options: Any) -> AdamW:
    params = new_params(dtype)
    named = [("one", params[0]), ("two", params[1])], [("three", params[2])]
    adamw = AdamW(
        [
            {"params": named[0], "lr": 1e-2, "mine": 7},
            {"params": named[1], "lr": 3e-3, "betas": (0.8, 0.99), "weight_decay": 0.3},
        ],
        **options,
    )
    for k in range(steps):
        random_gradients(params, seed=k % 3)
        adamw.step()
    return adamw


@FAMILY
@pytest.mark.parametrize(
    "of_params", [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
)
def test_what_is_taken_over(cls: Any, of_params: torch.dtype, backend: str) -> None:
    adamw = trained_adamw(dtype=of_params)
    optimizer = cls.from_adamw(adamw, backend=backend)
    for ours, theirs in zip(optimizer.param_groups, adamw.param_groups, strict=True):
        for name in ("lr", "betas", "eps", "weight_decay", "param_names", "mine"):
            assert ours.get(name) == theirs.get(name)
        assert [id(p) for p in ours["params"]] == [id(p) for p in theirs["params"]]
        for p in ours["params"]:
            state, known = optimizer.state[p], adamw.state[p]
            assert int(state["step"]) == 30
            assert torch.equal(state["exp_avg_sq"].to(of_params), known["exp_avg_sq"])
            v, average = (
                torch.view_as_real(t) if t.is_complex() else t.double()
                for t in (known["exp_avg_sq"], known["exp_avg"])
            )
            beta1, beta2 = theirs["betas"]
            d = theirs["eps"] + (v / (1 - beta2**30)).sqrt()
            m = state["momentum_buffer"]
            m = torch.view_as_real(m) if m.is_complex() else m
            wanted = theirs["lr"] * average / (1 - beta1**30) / d
            assert torch.allclose(m.double(), wanted.double(), rtol=1e-4)
    assert optimizer.decay_form == ("paper" if cls is NGNMDv1W else "adamw")


def test_a_run_goes_on_as_it_was(backend: str) -> None:
    """Where rho is 1: with the gradients of a plane, AdamW and what follows it stay together."""
    params, twins = new_params(torch.float64), new_params(torch.float64)
    slopes = [p.detach().clone() for p in params]
    optimizers = [AdamW(p, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1) for p in (params, twins)]

    def step(optimizer: Any, where: list[Parameter], **loss: float) -> None:
        for p, slope in zip(where, slopes, strict=True):
            p.grad = slope.clone()
        optimizer.step(**loss)

    for _ in range(300):
        for optimizer, where in zip(optimizers, (params, twins), strict=True):
            step(optimizer, where)
    ours = NGNMDv1.from_adamw(optimizers[0], loss_floor=-1e30, backend=backend)
    for _ in range(50):
        step(ours, params, loss=0.0)
        step(optimizers[1], twins)
    for p, q in zip(params, twins, strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)
    back = AdamW(params, lr=1.0)
    back.load_state_dict(ours.adamw_state_dict(lr=1e-3))
    for _ in range(50):
        step(back, params)
        step(optimizers[1], twins)
    for p, q in zip(params, twins, strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)


@FAMILY
@pytest.mark.parametrize("state", ["float32", "8bit"])
def test_there_and_back(cls: Any, state: str, backend: str) -> None:
    """Without a step in between AdamW has what it had."""
    adamw = trained_adamw()
    saved = copy.deepcopy(adamw.state_dict())
    there = cls.from_adamw(adamw, backend=backend, state=state)
    adamw.load_state_dict(there.adamw_state_dict())
    tolerance = {"rtol": 1e-5} if state == "float32" else {"rtol": 0.3, "atol": 0.01}
    for index, values in saved["state"].items():
        found = adamw.state_dict()["state"][index]
        assert int(found["step"]) == int(values["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(found[key], values[key], **tolerance)
    for group, before in zip(adamw.param_groups, saved["param_groups"], strict=True):
        assert {key: group[key] for key in before if key != "params"} == {
            key: value for key, value in before.items() if key != "params"
        }
    random_gradients(params_of(adamw), seed=9)
    adamw.step()


def test_a_state_dict_is_taken_over_by_name(backend: str) -> None:
    """The state; the values of the groups stay."""
    adamw = trained_adamw()
    saved = adamw.state_dict()
    params = params_of(adamw)
    groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "weight_decay": 0.2}]
    optimizer = NGNMDv1(groups, backend=backend, lr=1.0, step_cap=2.0, decay_form="adamw")
    with pytest.raises(ValueError, match=r"AdamW's: write optimizer.load_adamw_state_dict"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state
    before = [{**g, "params": None} for g in optimizer.param_groups]
    optimizer.load_adamw_state_dict(saved)
    assert [{**g, "params": None} for g in optimizer.param_groups] == before
    assert bits(optimizer.state[params[0]]["exp_avg_sq"]) == bits(
        adamw.state[params[0]]["exp_avg_sq"]
    )
    with pytest.raises(ValueError, match="1 parameter groups and the optimizer has 2"):
        optimizer.load_adamw_state_dict(AdamW(new_params()).state_dict())
    with pytest.raises(ValueError, match="no state_dict of an AdamW"):
        optimizer.load_adamw_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="no state_dict of an AdamW: load a flattened one into"):
        optimizer.load_adamw_state_dict({"flattened": 1})
    with pytest.raises(ValueError, match=r"pass state_dict\['optimizer'\], which is AdamW's"):
        optimizer.load_adamw_state_dict({"model": {}, "optimizer": saved})
    wrong: Any = adamw
    with pytest.raises(TypeError, match=r"not AdamW: .* is for NGNMDv1\.from_adamw\(adamw\)"):
        optimizer.load_adamw_state_dict(wrong)
    saved["state"][1]["max_exp_avg_sq"] = torch.ones(5)
    with pytest.raises(
        ValueError, match=r"parameter 1 has .*delete from state_dict\['state'\]\[1\]"
    ):
        optimizer.load_adamw_state_dict(saved)


@pytest.mark.parametrize("other", [torch.optim.RAdam, torch.optim.NAdam])
def test_relatives_of_adam_are_refused(other: Any) -> None:
    optimizer = other(new_params())
    random_gradients(params_of(optimizer), seed=0)
    optimizer.step()
    with pytest.raises(ValueError, match="no state_dict of an AdamW: it is from another optimizer"):
        NGNMDv1(new_params()).load_adamw_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"from no optimizer of ngn_kernels.*begin it without"):
        NGNMDv1(new_params()).load_state_dict(optimizer.state_dict())


@pytest.mark.filterwarnings("error")
def test_decay_that_would_act_otherwise_is_warned_of() -> None:
    saved = trained_adamw().state_dict()

    def loaded(cls: Any, weight_decay: float, **options: Any) -> None:
        params = new_params()
        of_groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer = cls(of_groups, weight_decay=weight_decay, **options)
        optimizer.load_adamw_state_dict(saved)

    with pytest.warns(UserWarning, match='write optimizer.decay_form = "adamw"'):
        loaded(NGNMDv1, 0.1)
    loaded(NGNMDv1, 0.0)
    loaded(NGNMDv1, 0.1, decay_form="adamw")
    loaded(NGNMDv1W, 0.1)


def test_a_key_of_the_users_own_makes_no_adamw() -> None:
    optimizer = NGNMDv1(new_params())
    random_gradients(params_of(optimizer), seed=0)
    optimizer.step(loss=1.0)
    optimizer.state[params_of(optimizer)[0]]["exp_avg"] = torch.ones(2)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[params_of(optimizer)[0]]["exp_avg"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("losses", [(1.0, 1e-8), (1e-8, 1.0), (1.0, 0.0)], ids=str)
def test_adamw_goes_on_at_the_speed_of_the_run(losses: tuple[float, float], backend: str) -> None:
    """However the step size has changed: its first displacement is that of the momentum."""
    (p,) = params = [Parameter(torch.ones(3, dtype=torch.float64))]
    optimizer = NGNMDv1(params, lr=1.0, loss_target=0.5, backend=backend)
    for k in range(50):
        p.grad = torch.ones_like(p)
        optimizer.step(loss=losses[k == 49])
    loaded = copy.deepcopy(optimizer)
    loaded.load_state_dict(optimizer.state_dict())
    m = optimizer.state[p]["momentum_buffer"].clone()
    for source in (optimizer, loaded):
        adamw = AdamW(params, lr=1.0, betas=(0.9, 0.999), weight_decay=0.0)
        adamw.load_state_dict(source.adamw_state_dict(lr=1e-3))
        assert adamw.param_groups[0]["lr"] == 1e-3
        before = p.detach().clone()
        p.grad = torch.zeros_like(p)
        adamw.step()
        assert torch.allclose(before - p, 0.9 * m, rtol=0.02)
        p.data.copy_(before)


def test_a_first_step_that_was_skipped_leaves_no_state_behind() -> None:
    params = new_params()
    optimizer = NGNMDv1(params, on_skip="ignore")
    for p in params:
        p.grad = torch.full_like(p, BAD)
    optimizer.step(loss=1.0)
    assert optimizer.adamw_state_dict()["state"] == {}
    saved = trained_adamw(1).state_dict()
    for values in saved["state"].values():
        values["step"].zero_()
    optimizer = NGNMDv1.from_adamw(trained_adamw(0))
    optimizer.load_adamw_state_dict(saved)
    assert not optimizer.state


SCHEDULERS = {
    "lambda": lambda o, at: torch.optim.lr_scheduler.LambdaLR(
        o, lambda k: 1 - k / 60, last_epoch=at
    ),
    "cosine": lambda o, at: torch.optim.lr_scheduler.CosineAnnealingLR(o, 60, last_epoch=at),
    "linear": lambda o, at: torch.optim.lr_scheduler.LinearLR(
        o, 1.0, 0.0, total_iters=60, last_epoch=at
    ),
    "exponential": lambda o, at: torch.optim.lr_scheduler.ExponentialLR(o, 0.95, last_epoch=at),
}


# Older ones take a step more where they begin with a last epoch.
RECURSIVE = pytest.mark.skipif(torch.__version__ < (2, 8), reason="of torch's own")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[RECURSIVE] if name in ("linear", "exponential") else [])
        for name, make in SCHEDULERS.items()
    ],
)
@pytest.mark.parametrize(
    "lr", [1.0, torch.tensor(1.0, dtype=torch.float64)], ids=["float", "tensor"]
)
def test_a_schedule_goes_on(make: Any, lr: Any) -> None:
    """Made anew with its last epoch, there and back; the lr is what the schedule leaves of the new one."""
    (param,) = params = [Parameter(torch.ones(3, dtype=torch.float64))]
    adamw = AdamW(params, lr=3e-3, weight_decay=0.0)
    adamw_beside = AdamW([Parameter(torch.ones(3))], lr=3e-3)
    schedule, beside = make(adamw, -1), make(adamw_beside, -1)

    def steps(optimizer: Any, count: int, unit: float, **loss: float) -> None:
        nonlocal schedule
        for _ in range(count):
            left = adamw_beside.param_groups[0]["lr"] / 3e-3
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(unit * left, rel=1e-9)
            param.grad = torch.ones_like(param)
            optimizer.step(**loss)
            schedule.step()
            beside.step()

    steps(adamw, 20, 3e-3)
    optimizer = NGNMDv1.from_adamw(adamw, lr=lr, loss_floor=-1e30)
    initial = optimizer.param_groups[0]["initial_lr"]
    schedule = make(optimizer, beside.last_epoch - 1)
    assert initial == 1.0 and optimizer.param_groups[0]["initial_lr"] is not lr
    steps(optimizer, 15, 1.0, loss=0.0)
    m = optimizer.state[param]["momentum_buffer"].clone()
    back = AdamW(params, lr=3e-3, weight_decay=0.0)
    back.load_state_dict(optimizer.adamw_state_dict(lr=3e-3))
    schedule = make(back, beside.last_epoch - 1)
    # With a gradient of 0 AdamW goes on at the speed of the run, as its lr falls.
    before, lr_before = param.detach().clone(), back.param_groups[0]["lr"]
    param.grad = torch.zeros_like(param)
    back.step()
    bias = (1 - 0.9**35) / (1 - 0.9**36) * (1 - 0.999**36) ** 0.5 / (0.999 * (1 - 0.999**35)) ** 0.5
    wanted = 0.9 * m * bias * lr_before / (3e-3 * (1.0 if lr_before == 0 else lr_before / 3e-3))
    assert torch.allclose(before - param.detach(), wanted, rtol=1e-6)
    schedule.step()
    beside.step()
    steps(back, 5, 3e-3)


def test_after_the_end_of_a_schedule_a_new_one_begins() -> None:
    adamw = trained_adamw()
    schedule = torch.optim.lr_scheduler.LinearLR(adamw, 1.0, 0.0, total_iters=2)
    for _ in range(2):
        adamw.step()
        schedule.step()
    optimizer = NGNMDv1.from_adamw(adamw, lr=1.0)
    assert [g["lr"] for g in optimizer.param_groups] == [1.0, 0.3]
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    assert [g["lr"] for g in optimizer.param_groups] == [1.0, 0.3]


def test_one_cycle_goes_on() -> None:
    def cycle(optimizer: Any, peak: float, at: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, peak, total_steps=60, cycle_momentum=False, last_epoch=at
        )

    adamw, other = (AdamW([Parameter(torch.ones(3))]) for _ in range(2))
    schedules = cycle(adamw, 3e-3, -1), cycle(other, 1.0, -1)
    for _ in range(30):
        for optimizer, schedule in zip((adamw, other), schedules, strict=True):
            optimizer.step()
            schedule.step()
    optimizer = NGNMDv1.from_adamw(adamw, lr=1.0)
    cycle(optimizer, 1.0, 29)
    for name in ("lr", "max_lr", "min_lr", "initial_lr"):
        assert optimizer.param_groups[0][name] == pytest.approx(other.param_groups[0][name])


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_short_runs_go_on_at_their_speed(steps: int) -> None:
    """AdamW divides by 1 - beta1^t; the last displacement is the momentum."""
    (param,) = params = [Parameter(torch.ones(3, dtype=torch.float64))]
    adamw = AdamW(params, lr=1e-3, weight_decay=0.0)
    for _ in range(steps):
        before = param.detach().clone()
        param.grad = torch.full_like(param, 0.1)
        adamw.step()
    optimizer = NGNMDv1.from_adamw(adamw, betas=(0.9, 0.95))
    state = optimizer.state[param]
    assert torch.allclose(state["momentum_buffer"], before - param.detach(), rtol=1e-6)
    size = (state["exp_avg_sq"] / (1 - 0.95**steps)).sqrt()
    assert torch.allclose(size, torch.full_like(size, 0.1)), "with the other beta2"


def test_values_of_the_groups_stay_what_they_are(backend: str) -> None:
    adamw = trained_adamw()
    lr, lock = torch.tensor(0.5), threading.Lock()
    adamw.param_groups[0]["lock"] = lock
    optimizer = NGNMDv1.from_adamw(adamw, lr=lr, backend=backend)
    assert optimizer.param_groups[0]["lr"] is lr and optimizer.param_groups[0]["lock"] is lock
    assert optimizer.param_groups[1]["lr"].item() == pytest.approx(0.15)
    for group in optimizer.param_groups:
        group["lr"].fill_(0.0)
    before = [p.detach().clone() for p in params_of(optimizer)]
    for group in optimizer.param_groups:
        group["betas"] = (0.0, 0.999)
    random_gradients(params_of(optimizer), seed=0)
    optimizer.step(loss=1.0)
    assert all(torch.equal(p, b) for p, b in zip(params_of(optimizer), before, strict=True))


def test_betas_may_be_tensors() -> None:
    betas = (torch.tensor(0.9), torch.tensor(0.95))
    adamw = AdamW(new_params(), lr=torch.tensor(1e-2), betas=betas, capturable=True, foreach=False)
    group = NGNMDv1.from_adamw(adamw).param_groups[0]
    assert group["betas"] == pytest.approx((0.9, 0.95))


def test_an_lr_of_0_says_nothing_of_adamws_average() -> None:
    optimizer = NGNMDv1.from_adamw(trained_adamw(), lr=0.5)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    with pytest.raises(ValueError, match=r"lr 0.*adamw_state_dict\(lr=\.\.\.\)"):
        optimizer.adamw_state_dict()
    average = optimizer.adamw_state_dict(lr=1e-3)["state"][0]["exp_avg"]
    assert average.isfinite().all() and average.any()


def test_step_counts_do_not_follow_defaults() -> None:
    optimizer = NGNMDv1.from_adamw(trained_adamw())
    torch.set_default_dtype(torch.bfloat16)
    try:
        (step, *_) = (s["step"] for s in optimizer.adamw_state_dict()["state"].values())
    finally:
        torch.set_default_dtype(torch.float32)
    assert step.dtype == torch.float32 and step == 30


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_of_a_wrapped_model_are_those_of_the_model(prefix: str) -> None:
    """Those that torch.compile and DDP give; torch's AdamW compares no names at all."""
    params = new_params()
    adamw = AdamW([(f"{prefix}layer.{k}", p) for k, p in enumerate(params)])
    random_gradients(params, seed=0)
    adamw.step()
    optimizer = NGNMDv1([(f"layer.{k}", p) for k, p in enumerate(params)])
    optimizer.load_adamw_state_dict(adamw.state_dict())
    assert int(optimizer.state[params[0]]["step"]) == 1


def test_an_eps_of_0_where_every_gradient_was_0() -> None:
    (param,) = params = [Parameter(torch.ones(2, dtype=torch.float64))]
    adamw = AdamW(params, eps=0.0, weight_decay=0.0)
    param.grad = torch.tensor([0.0, 1e-3], dtype=torch.float64)
    adamw.state[param].update(
        step=torch.tensor(1.0),
        exp_avg=0.1 * param.grad,
        exp_avg_sq=0.001 * param.grad**2,
    )
    optimizer = NGNMDv1.from_adamw(adamw, eps=1e-8)
    m = optimizer.state[param]["momentum_buffer"]
    assert torch.allclose(m, torch.tensor([0.0, 1e-3], dtype=torch.float64), rtol=1e-6)
    optimizer.step(loss=1.0)
    assert param[0] == 1.0 and param.isfinite().all()


def test_other_names_are_refused() -> None:
    one, two = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    adamw = AdamW([("one", one), ("two", two)])
    with pytest.raises(ValueError, match=r"\['one', 'two'\] and the optimizer's \['two', 'one'\]"):
        NGNMDv1([("two", two), ("one", one)]).load_adamw_state_dict(adamw.state_dict())


def test_a_run_in_float32_goes_on_in_bfloat16_with_exact_rounding() -> None:
    model = nn.Linear(4, 4)
    adamw = AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    adamw.step()
    model.bfloat16()
    optimizer = NGNMDv1.from_adamw(adamw, rounding="exact")
    for param in model.parameters():
        assert optimizer.state[param]["remainder"].dtype == torch.int16
        param.grad = torch.ones_like(param)
    optimizer.step(loss=1.0)


def test_a_new_lr_is_that_of_new_schedules_too() -> None:
    adamw = trained_adamw()
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda k: 0.5)
    optimizer = NGNMDv1.from_adamw(adamw, lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5, last_epoch=0)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.15]


def test_values_of_the_groups_may_be_given() -> None:
    values = {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.0}
    optimizer = NGNMDv1.from_adamw(trained_adamw(weight_decay=0.4), **values)
    for group in optimizer.param_groups:
        assert {name: group[name] for name in values} == values
    with pytest.raises(ValueError, match="lr=-1"):
        NGNMDv1.from_adamw(trained_adamw(), lr=-1.0)
    optimizer = NGNMDv1.from_adamw(trained_adamw(weight_decay=0.4, lr=0.2))
    optimizer.add_param_group({"params": [("late", Parameter(torch.ones(2)))]})
    assert optimizer.param_groups[-1]["weight_decay"] == 0.4
    assert optimizer.param_groups[-1]["lr"] == 0.2


def test_a_fused_adamw_stays_fused() -> None:
    """torch takes these switches from a state_dict; under a GradScaler the wrong one is an error."""
    (p,) = params = [Parameter(torch.ones(3))]
    adamw, scaler = AdamW(params, fused=True), torch.amp.GradScaler("cpu")
    for k in range(3):
        if k:
            switches = {"fused": True, "capturable": True}
            adamw.load_state_dict(NGNMDv1.from_adamw(adamw).adamw_state_dict(**switches))
            assert adamw.param_groups[0]["fused"] and adamw.param_groups[0]["capturable"]
        adamw.zero_grad()
        scaler.scale((p**2).sum()).backward()
        scaler.step(adamw)
        scaler.update()
        assert int(adamw.state[p]["step"]) == k + 1


def test_a_step_count_comes_back_as_adamw_keeps_it() -> None:
    """On the host, whatever it is here: AdamW would wait for a GPU's at each parameter."""
    optimizer = NGNMDv1(new_params())
    random_gradients(params_of(optimizer), seed=0)
    optimizer.step(loss=1.0)
    for p in params_of(optimizer):
        optimizer.state[p]["step"] = 7
    for values in optimizer.adamw_state_dict()["state"].values():
        assert values["step"].item() == 7 and values["step"].is_cpu


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf"), "1e-3"])
def test_a_bad_lr_for_adamw_is_refused(lr: Any) -> None:
    with pytest.raises(ValueError, match=r"lr=.*must be in \[0, inf\)"):
        NGNMDv1(new_params()).adamw_state_dict(lr=lr)


def test_an_adam_of_a_torch_that_knew_no_decoupled_decay() -> None:
    adam, adamw = Adam(new_params(), weight_decay=0.1), AdamW(new_params(), weight_decay=0.1)
    for optimizer in (adam, adamw):
        optimizer.param_groups[0].pop("decoupled_weight_decay", None)
    with pytest.raises(ValueError, match="Adam's weight_decay is a part of the gradient"):
        NGNMDv1.from_adamw(adam)
    assert NGNMDv1.from_adamw(adamw).param_groups[0]["weight_decay"] == 0.1


def test_exact_rounding_begins_without_remainders() -> None:
    adamw = trained_adamw(dtype=torch.bfloat16)
    optimizer = NGNMDv1.from_adamw(adamw, rounding="exact")
    (p, *_) = params_of(optimizer)
    assert not optimizer.state[p]["remainder"].any()
    random_gradients(params_of(optimizer), seed=0)
    optimizer.step(loss=1.0)


@pytest.mark.parametrize("cls", [NGN, NGNM, NGND])
def test_algorithms_with_another_state_say_so(cls: Any) -> None:
    optimizer = cls(new_params())
    with pytest.raises(ValueError, match=r"AdamW's: .* keeps another state, so begin it without"):
        optimizer.load_state_dict(AdamW(new_params()).state_dict())


def test_layer_wise_lrs_keep_their_ratios() -> None:
    """A new lr is that of the group with the largest one; a group that is frozen by lr 0 stays so."""
    adamw = trained_adamw()
    adamw.add_param_group({"params": [("four", Parameter(torch.ones(2)))], "lr": 0.0})
    optimizer = NGNMDv1.from_adamw(adamw, lr=1.0, loss_target=0.8)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1.0, 0.3, 0.0])
    assert optimizer.loss_target == 0.8
    back = optimizer.adamw_state_dict(lr=1e-2)["param_groups"]
    assert [g["lr"] for g in back] == pytest.approx([1e-2, 3e-3, 0.0])
    for group in adamw.param_groups:
        group["lr"] = 0.0
    optimizer = NGNMDv1.from_adamw(adamw, lr=1.0)
    assert [g["lr"] for g in optimizer.param_groups] == [1.0, 1.0, 1.0], "no ratio is known"


def test_groups_without_weight_decay_stay_without() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    decays = [
        [g["weight_decay"] for g in NGNMDv1.from_adamw(adamw, weight_decay=0.05).param_groups]
        for adamw in (AdamW(groups(model, 0.1)), AdamW(groups(model, 0.0)))
    ]
    assert decays == [[0.05, 0.0], [0.05, 0.05]]


def test_a_tensor_lr_belongs_to_one_optimizer() -> None:
    (param,) = params = [Parameter(torch.ones(3))]
    adamw = AdamW(params, lr=torch.tensor(1e-2), foreach=False)
    param.grad = torch.ones(3)
    adamw.step()
    optimizer = NGNMDv1.from_adamw(adamw)
    optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})
    for group in optimizer.param_groups:
        group["lr"].fill_(1.0)
    assert adamw.param_groups[0]["lr"].item() == adamw.defaults["lr"].item() == pytest.approx(1e-2)
    saved = optimizer.adamw_state_dict(lr=torch.tensor(1e-3))
    known = optimizer.adamw_state_dict(lr=1e-3)["state"][0]["exp_avg"]
    assert torch.allclose(saved["state"][0]["exp_avg"], known)
    assert saved["param_groups"][0]["lr"].item() == pytest.approx(1e-3)
    for lr in (torch.tensor(-1.0), torch.ones(2)):
        with pytest.raises(ValueError, match=r"lr=.*must be in \[0, inf\)"):
            optimizer.adamw_state_dict(lr=lr)


def test_an_adamw_that_has_not_stepped() -> None:
    optimizer = NGNMDv1.from_adamw(trained_adamw(steps=0))
    assert not optimizer.state
    random_gradients(params_of(optimizer), seed=0)
    optimizer.step(loss=1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: AdamW(p, maximize=True), "maximize=True"),
        (lambda p: Adam(p, weight_decay=0.1), "Adam's weight_decay is a part of the gradient"),
    ],
)
def test_what_has_no_counterpart_is_refused(make: Any, message: str) -> None:
    other = make(new_params())
    with pytest.raises(ValueError, match=message):
        NGNMDv1.from_adamw(other)
    random_gradients(params_of(other), seed=0)
    other.step()
    saved = other.state_dict()
    if type(other) is Adam and "decoupled_weight_decay" not in saved["param_groups"][0]:
        return  # saved by torch 2.6, it could be AdamW's
    with pytest.raises(ValueError, match=message):
        NGNMDv1(new_params()).load_adamw_state_dict(saved)


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"AdamW or Adam, not SGD$"):
        NGNMDv1.from_adamw(torch.optim.SGD(new_params()))
    wrapper: Any = SimpleNamespace(optim=trained_adamw())
    with pytest.raises(TypeError, match=r"not SimpleNamespace; pass its \.optim$"):
        NGNMDv1.from_adamw(wrapper)
    for cls in (NGN, NGNM, NGND, NGNMuon):
        with pytest.raises(NotImplementedError, match=f"{cls.__name__} keeps another state"):
            cls.from_adamw(trained_adamw())


def test_groups_of_what_is_no_model_are_refused() -> None:
    with pytest.raises(TypeError, match=r"the model itself, a torch\.nn\.Module, not generator"):
        groups(nn.Linear(2, 2).parameters(), weight_decay=0.1)
    with pytest.raises(ValueError, match="params of the groups are what groups finds"):
        groups(nn.Linear(2, 2), 0.1, params=[Parameter(torch.ones(2))])


@pytest.mark.parametrize("saving", CLASSES)
@pytest.mark.parametrize("loading", CLASSES)
def test_equal_rules_load_each_other(saving: Any, loading: Any) -> None:
    source = saving(new_params())
    random_gradients(params_of(source), seed=0)
    source.step(loss=1.0)
    target = loading(new_params())
    if RULES[saving.__name__] == RULES[loading.__name__]:
        target.load_state_dict(source.state_dict())
        assert all(g["algorithm"] == loading.__name__ for g in target.param_groups)
        random_gradients(params_of(target), seed=1)
        target.step(loss=1.0)
        return
    with pytest.raises(
        ValueError, match=f"is from {saving.__name__} and this is {loading.__name__}"
    ):
        target.load_state_dict(source.state_dict())


# Parameter groups


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def names(group: dict[str, Any]) -> list[str]:
    return [name for name, _ in group["params"]]


def test_groups() -> None:
    decayed, others = groups(Tied(), weight_decay=0.1, lr=0.5)
    assert names(decayed) == ["embed.weight", "hidden.weight"]
    assert names(others) == ["hidden.bias", "norm.weight", "norm.bias"]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decayed["lr"] == others["lr"] == 0.5
    decayed, others = groups(Tied(), weight_decay=0.1, decay_embeddings=False)
    assert names(decayed) == ["hidden.weight"] and names(others)[0] == "embed.weight"


def test_norms_and_vectors_of_several_dimensions_have_no_decay() -> None:
    model = nn.Module()
    model.layer = nn.LayerNorm((4, 4))
    model.rms = nn.RMSNorm((4, 4))
    model.batch = nn.BatchNorm2d(4)
    model.instance = nn.InstanceNorm1d(4, affine=True)
    model.token = Parameter(torch.ones(1, 1, 8))
    model.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))
    decayed, others = groups(model, weight_decay=0.1)
    assert names(decayed) == ["scaled.parametrizations.weight.original1"]
    assert len(names(others)) == 9


def test_groups_without_one_kind() -> None:
    (only,) = groups(nn.Linear(3, 2, bias=False), weight_decay=0.1)
    assert names(only) == ["weight"]
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        groups(nn.Linear(3, 2).requires_grad_(False), weight_decay=0.1)


@pytest.mark.parametrize("cls", [NGNMDv1, AdamW])
def test_groups_are_for_any_optimizer(cls: Any) -> None:
    optimizer = cls(groups(Tied(), weight_decay=0.1), lr=0.01)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["param_names"] == ["embed.weight", "hidden.weight"]


# Skipped steps


def steps_with(optimizer: Any, gradients: list[float]) -> None:
    (p,) = params_of(optimizer)
    for value in gradients:
        p.grad = torch.full_like(p, value)
        optimizer.step(loss=1.0)


BAD = float("nan")


def test_a_skipped_step_may_raise(backend: str) -> None:
    optimizer = NGNMDv1(
        [("head.weight", Parameter(torch.ones(3)))], on_skip="raise", backend=backend
    )
    steps_with(optimizer, [1.0])
    before = params_of(optimizer)[0].tolist()
    with pytest.raises(
        SkippedStepError, match=r"not finite.*the gradient of parameter 'head.weight'"
    ):
        steps_with(optimizer, [BAD])
    assert params_of(optimizer)[0].tolist() == before
    steps_with(optimizer, [1.0])
    assert params_of(optimizer)[0].tolist() != before and int(optimizer.skipped_steps) == 1


def test_an_overflow_of_a_scaler_does_not_raise() -> None:
    """Unless it is the last of too many."""
    optimizer = NGNMDv1([Parameter(torch.ones(3))], on_skip="raise", max_skipped_steps=3)
    (p,) = params_of(optimizer)
    p.grad = torch.ones(3)
    for k in range(3):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
        expected = pytest.warns(SkippedStepWarning, match="overflow")
        with expected if k < 2 else pytest.raises(SkippedStepError, match=r"overflow.*3 steps"):
            optimizer.step(loss=1.0)


@pytest.mark.filterwarnings("error")
def test_a_skipped_step_may_be_ignored(backend: str) -> None:
    optimizer = NGNMDv1([Parameter(torch.ones(3))], on_skip="ignore", backend=backend)
    steps_with(optimizer, [1.0, BAD, BAD, 1.0])
    assert int(optimizer.skipped_steps) == 2


@pytest.mark.parametrize("on_skip", ["warn", "ignore"])
def test_a_run_that_only_skips_is_stopped(on_skip: str, backend: str) -> None:
    optimizer = NGNMDv1(
        [Parameter(torch.ones(3))], on_skip=on_skip, max_skipped_steps=3, backend=backend
    )
    with pytest.warns(SkippedStepWarning) if on_skip == "warn" else _nothing():
        steps_with(optimizer, [1.0, BAD, BAD, 1.0, BAD, BAD])
    with pytest.raises(SkippedStepError, match=r"3 steps in a row; max_skipped_steps=3"):
        steps_with(optimizer, [BAD])
    optimizer.max_skipped_steps = None
    with pytest.warns(SkippedStepWarning) if on_skip == "warn" else _nothing():
        steps_with(optimizer, [BAD] * 4)


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda p: p.grad[0].fill_(BAD), "the gradient of parameter 'b' 1 of group 0"),
        (lambda p: p.data[0].fill_(BAD), r"\(parameter 'b' 1 of group 0"),
    ],
    ids=["gradient", "parameter"],
)
def test_elements_that_were_kept_are_named(spoil: Any, what: str, backend: str) -> None:
    params = [Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = NGNMDv2([*zip("ab", params, strict=True)], on_skip="raise", backend=backend)
    for p in params:
        p.grad = torch.ones(3)
    spoil(params[1])
    with pytest.raises(
        SkippedStepError, match=rf"kept their old values: they.*{what}.* is not finite"
    ):
        optimizer.step(loss=1.0)


def test_a_run_under_amp_with_a_bad_weight_is_stopped() -> None:
    """Every step overflows until the scale is 0, and nothing else would stop it."""
    (p,) = params = [Parameter(torch.full((3,), BAD))]
    optimizer = NGNMDv1(params, on_skip="ignore", max_skipped_steps=100)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-100)
    with pytest.raises(SkippedStepError, match="100 steps in a row"):
        for _ in range(101):
            optimizer.zero_grad()
            loss = (p**2).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer, loss=1.0)
            scaler.update()
    assert scaler.get_scale() == 0 and int(optimizer.skipped_steps) == 100


def test_ranks_are_mentioned_only_among_ranks() -> None:
    optimizer = NGNMDv1([Parameter(torch.ones(3))])
    params_of(optimizer)[0].grad = torch.ones(3)
    with pytest.warns(SkippedStepWarning) as said:
        optimizer.step(loss=BAD)
    assert "rank" not in str(said[0].message)


@pytest.mark.parametrize(
    ("name", "values"),
    [("on_skip", ("no", None, True)), ("max_skipped_steps", (0, -1, 1.5, "3", True))],
)
def test_bad_values_of_the_skip_options(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name}=.*must be .*(ignore|a positive integer)"):
            NGNM([Parameter(torch.ones(3))], **{name: value})


def test_options_of_skips_are_copied() -> None:
    optimizer = NGNM([Parameter(torch.ones(3))], on_skip="raise", max_skipped_steps=5)
    copied = copy.deepcopy(optimizer)
    assert copied.on_skip == "raise" and copied.max_skipped_steps == 5


# Metrics


def test_metrics(backend: str) -> None:
    optimizer = NGNM(
        [{"params": [Parameter(torch.ones(3))]}, {"params": [Parameter(torch.ones(2))], "lr": 0.5}],
        backend=backend,
    )
    assert set(optimizer.metrics()) == {"ngn/skipped_steps"}
    for p in params_of(optimizer):
        p.grad = torch.ones_like(p)
    optimizer.step(loss=2.0)
    found = optimizer.metrics(as_floats=True, prefix="mine")
    rho = 4 / (4 + 3 + 0.5 * 2)
    assert json.loads(json.dumps(found)) == pytest.approx(
        {
            "mine/shrink": rho,
            "mine/step_size": rho,
            "mine/step_size/1": 0.5 * rho,
            "mine/grad_norm": 5**0.5,
            "mine/skipped_steps": 0,
        }
    )
    tensors = optimizer.metrics()
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    assert set(NGNMDv2([Parameter(torch.ones(3))]).metrics()) == {"ngn/skipped_steps"}


# Names


def test_every_class_says_all_its_options() -> None:
    shared = inspect.signature(NGNOptimizer.__init__).parameters
    options = {name: p.default for name, p in shared.items() if p.kind is p.KEYWORD_ONLY}
    for cls in (*CLASSES, ngn_kernels.NGNMuon):
        own = inspect.signature(cls.__init__).parameters
        wanted = {n: d for n, d in options.items() if n != "nesterov" or cls.__name__ == "NGNMuon"}
        assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in own.values()), cls
        assert {name: own[name].default for name in wanted} == wanted
        assert own["step_cap"].default is None


def test_types_of_options_have_their_values() -> None:
    assert get_args(options.DecayForm) == DECAY_FORMS
    assert get_args(options.RoundingName) == tuple(ROUNDINGS)
    assert get_args(options.StateFormat) == tuple(STATE_FORMATS)


def test_the_package_shows_its_public_names() -> None:
    assert dir(ngn_kernels) == sorted(ngn_kernels.__all__)
    assert all(hasattr(ngn_kernels, name) for name in ngn_kernels.__all__)
