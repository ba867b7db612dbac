"""state_dict, deepcopy and pickle: a copy goes on bit for bit as the original would have."""

from __future__ import annotations

import copy
import inspect
import pickle
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from algorithms import EVERY, NGNM, Algorithm, NGNMDv1, NGNMDv2
from conftest import runnable_backends
from helpers import (
    GPU_ENGINES,
    SHAPES,
    copies_of,
    params_of,
    random_columns,
    random_gradients,
    snapshot,
    through_file,
    unchanged,
)
from pair import Pair
from steps import check_next_step
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter

import ngn_kernels
from ngn_kernels import SkippedStepWarning
from ngn_kernels.planning import signature

NAN, INF = float("nan"), float("inf")


def trained(algorithm: Algorithm, backend: str, dtype: torch.dtype, **options: Any) -> Any:
    """After three steps, one parameter having missed the second."""
    optimizer = algorithm.build(random_columns(SHAPES, dtype), backend=backend, **options)
    for k in range(3):
        advance(optimizer, k, skip_one=k == 1)
    return optimizer


def untrained(like: Any, algorithm: Algorithm, backend: str, **options: Any) -> Any:
    """Another optimizer over copies of the same parameters, with other values in its groups."""
    groups = [{"params": column, "lr": 0.123} for column in copies_of(like)]
    return algorithm.simple(groups, backend=backend, **options)


def advance(optimizer: Any, seed: int, skip_one: bool = False) -> None:
    random_gradients(params_of(optimizer), seed=seed)
    if skip_one:
        params_of(optimizer)[1].grad = None
    optimizer.step(loss=1.0 / (seed + 1))


@EVERY
@pytest.mark.essential
def test_round_trip_goes_on_bit_for_bit(
    algorithm: Algorithm, backend: str, dtype: torch.dtype
) -> None:
    """Through torch.save and weights_only load, in every dtype: state is never recast."""
    optimizer = trained(algorithm, backend, dtype, max_grad_norm=0.7)
    other = untrained(optimizer, algorithm, backend, max_grad_norm=0.7)
    other.load_state_dict(through_file(optimizer.state_dict()))
    for k in range(3, 6):
        assert snapshot(other) == snapshot(optimizer)
        for p, q in zip(params_of(optimizer), params_of(other), strict=True):
            for key, value in optimizer.state[p].items():
                assert other.state[q][key].dtype == value.dtype
        advance(optimizer, k)
        advance(other, k)
    assert snapshot(other) == snapshot(optimizer)


@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1, NGNMDv2], ids=str)
def test_round_trip_while_momentum_is_off(algorithm: Algorithm, backend: str) -> None:
    """A buffer once there goes on holding the last displacement, through a checkpoint too."""

    def set_momentum(optimizer: Any, beta: float) -> None:
        for group in optimizer.param_groups:
            if algorithm.momentum == "momentum":
                group["momentum"] = beta
            else:
                group["betas"] = (beta, group["betas"][1])

    optimizer = trained(algorithm, backend, torch.float32)
    set_momentum(optimizer, 0.0)
    other = untrained(optimizer, algorithm, backend)
    other.load_state_dict(optimizer.state_dict())
    for k, beta in ((3, 0.0), (4, 0.9)):
        for each in (optimizer, other):
            set_momentum(each, beta)
            check_next_step(algorithm, each, seed=k, loss=0.3)
        assert snapshot(other) == snapshot(optimizer)


@EVERY
def test_loaded_values_of_the_groups(algorithm: Algorithm, backend: str) -> None:
    optimizer = trained(algorithm, backend, torch.float32)
    other = untrained(optimizer, algorithm, backend)
    other.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }


@EVERY
def test_the_copy_is_independent(algorithm: Algorithm, backend: str) -> None:
    """What was saved is the first one's own tensors: loading them shares none."""
    optimizer = trained(algorithm, backend, torch.float32)
    other = untrained(optimizer, algorithm, backend)
    other.load_state_dict(optimizer.state_dict())
    before = snapshot(optimizer)
    advance(other, 9)
    assert snapshot(optimizer) == before


@EVERY
def test_state_goes_to_another_backend(algorithm: Algorithm, backend: str) -> None:
    optimizer = trained(algorithm, backend, torch.float32)
    for name in runnable_backends():
        other = untrained(optimizer, algorithm, name)
        other.load_state_dict(optimizer.state_dict())
        assert snapshot(other) == snapshot(optimizer)
        check_next_step(algorithm, other, seed=7, loss=0.4)


@EVERY
def test_state_dict_carries_no_backend(algorithm: Algorithm, backend: str) -> None:
    saved = trained(algorithm, backend, torch.float32).state_dict()
    assert not any(
        {"backend", "max_grad_norm", "loss_floor"} & set(g) for g in saved["param_groups"]
    )


@EVERY
def test_float32_state_for_float64_parameters_is_kept(algorithm: Algorithm, backend: str) -> None:
    """State loaded under parameters of another dtype stays what it was, and the step goes on."""
    if backend in GPU_ENGINES:
        pytest.skip("no float64 on this backend")
    optimizer = trained(algorithm, backend, torch.float32)
    other = algorithm.build(
        [[Parameter(p.double()) for p in column] for column in copies_of(optimizer)],
        backend=backend,
    )
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(params_of(optimizer), params_of(other), strict=True):
        for key, value in optimizer.state[p].items():
            loaded = other.state[q][key]
            assert loaded.dtype == value.dtype and torch.equal(loaded, value)
    advance(optimizer, 5)
    advance(other, 5)
    for p, q in zip(params_of(optimizer), params_of(other), strict=True):
        torch.testing.assert_close(q, p.double(), rtol=1e-5, atol=1e-7)


@EVERY
def test_load_into_channels_last(algorithm: Algorithm, backend: str) -> None:
    """State saved from contiguous parameters, loaded under channels_last ones, and back."""
    shape = (4, 3, 5, 2)
    (p,) = random_columns([[shape]])[0]
    optimizer = algorithm.simple([p], backend=backend)
    advance(optimizer, 0)
    moved = Parameter(p.detach().contiguous(memory_format=torch.channels_last))
    pair = Pair(algorithm, algorithm.simple([moved], backend=backend))
    pair.optimizer.load_state_dict(optimizer.state_dict())
    pair.sync()
    random_gradients([moved], seed=1)
    pair.step(0.5)
    pair.check_step()

    back = Pair(
        algorithm, algorithm.simple([Parameter(moved.detach().contiguous())], backend=backend)
    )
    back.optimizer.load_state_dict(pair.optimizer.state_dict())
    back.sync()
    random_gradients(params_of(back.optimizer), seed=2)
    back.step(0.5)
    back.check_step()


@EVERY
def test_complex_round_trip(algorithm: Algorithm, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    p = Parameter(torch.randn(6, generator=generator, dtype=torch.complex64))
    optimizer = algorithm.simple([p], backend=backend)
    advance(optimizer, 0)
    other = algorithm.simple([Parameter(p.detach().clone())], backend=backend)
    other.load_state_dict(optimizer.state_dict())
    advance(optimizer, 1)
    advance(other, 1)
    assert snapshot(other) == snapshot(optimizer)


@EVERY
def test_deepcopy_and_pickle(algorithm: Algorithm, backend: str) -> None:
    optimizer = trained(algorithm, backend, torch.float32, max_grad_norm=0.7, loss_floor=-1.0)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    before = snapshot(optimizer)
    for other in copies:
        assert snapshot(other) == before
        advance(other, 5)
        assert type(other) is type(optimizer)
        assert int(other.skipped_steps) == 0
    assert snapshot(optimizer) == before, "a copy must not share tensors with the original"
    advance(optimizer, 5)
    for other in copies:
        assert snapshot(other) == snapshot(optimizer)


def test_copies_know_the_count_of_skipped_steps(backend: str) -> None:
    optimizer = trained(NGNMDv1, backend, torch.float32)
    for k in range(2):
        with pytest.warns(SkippedStepWarning):
            optimizer.step(loss=float("nan"))
        copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        copies.append(copy.deepcopy(copies[0]))
        assert [int(other.skipped_steps) for other in (optimizer, *copies)] == [k + 1] * 4
    with pytest.warns(SkippedStepWarning):
        copies[0].step(loss=float("nan"))
    assert [int(other.skipped_steps) for other in (optimizer, *copies)] == [2, 3, 2, 2]


def test_deepcopy_together_with_the_model(backend: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = NGNMDv1.simple(model.parameters(), backend=backend)
    advance(optimizer, 0)
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert params_of(twin)[0] is twin_model.weight
    advance(twin, 1)
    advance(optimizer, 1)
    assert torch.equal(twin_model.weight, model.weight)


BAD_NUMBERS: dict[str, tuple[str, Any, str]] = {
    "v nan": ("exp_avg_sq", NAN, "not finite"),
    "v inf": ("exp_avg_sq", INF, "not finite"),
    "v negative": ("exp_avg_sq", -1e-30, "negative"),
    "m nan": ("momentum_buffer", NAN, "not finite"),
    "m inf": ("momentum_buffer", -INF, "not finite"),
    **{f"step {count}": ("step", count, f"is {count}") for count in (-1.0, -3.0, NAN, INF, 2.5)},
}


@pytest.mark.essential
@pytest.mark.parametrize("state", ["float32", "8bit"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize(("key", "bad", "says"), BAD_NUMBERS.values(), ids=BAD_NUMBERS)
def test_numbers_that_no_step_stores_are_not_loaded(
    key: str, bad: float, says: str, kind: torch.dtype, state: str, backend: str
) -> None:
    if backend in GPU_ENGINES and kind == torch.float64:
        pytest.skip("it has no float64")
    if kind == torch.float64 and state != "float32":
        pytest.skip("it keeps float64 state")
    p = Parameter(torch.ones(4100, dtype=kind))
    optimizer = NGNMDv1.simple([("w", p)], backend=backend, state=state)
    advance(optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    values = saved["state"][0]
    if key == "step":
        values["step"] = torch.tensor(bad)
    else:
        numbers = torch.view_as_real(values[key]) if kind.is_complex else values[key]
        numbers.view(-1)[-1] = bad  # of a complex one the imaginary part
    before = snapshot(optimizer)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=rf"the {key} of parameter 'w' 0 .*, as loaded, .*{says}"
        ):
            optimizer.load_state_dict(saved)
        assert snapshot(optimizer) == before
        advance(optimizer, 1)
        before = snapshot(optimizer)


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor([3]), torch.tensor(3.0)], ids=repr)
def test_step_counts_that_are_loaded(count: Any, backend: str) -> None:
    optimizer = trained(NGNMDv1, backend, torch.float32)
    saved = copy.deepcopy(optimizer.state_dict())
    for values in saved["state"].values():
        values["step"] = count
    optimizer.load_state_dict(saved)
    check_next_step(NGNMDv1, optimizer, seed=9, loss=1.0)
    assert {float(values["step"]) for values in optimizer.state.values()} == {4.0}


@pytest.mark.essential
@EVERY
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_groups_in_tuples(
    algorithm: Algorithm, native: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what is loaded, and in what the user assigns; with the bits of groups in lists."""
    if not native:
        monkeypatch.setattr(signature, "NativeSignature", None)
    optimizer = trained(algorithm, backend, torch.float32)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"] = tuple(
        {**group, "params": tuple(group["params"])} for group in saved["param_groups"]
    )
    loaded, assigned = (untrained(optimizer, algorithm, backend) for _ in range(2))
    for other in (loaded, assigned):
        other.load_state_dict(saved)
    advance(assigned, 3)  # a plan that is kept
    assigned.param_groups = tuple(
        {**group, "params": tuple(group["params"])} for group in assigned.param_groups
    )
    advance(loaded, 3)
    advance(optimizer, 3)
    for k in range(4, 7):
        assert snapshot(loaded) == snapshot(assigned) == snapshot(optimizer)
        for each in (optimizer, loaded, assigned):
            advance(each, k, skip_one=k == 5)
    plan = assigned._plan
    advance(assigned, 7)
    assert assigned._plan is plan, "the plan is kept"


# What is the user's own, and what belongs to the whole optimizer


@pytest.mark.essential
@EVERY
@pytest.mark.parametrize("state", ["float32", "8bit"])
def test_keys_of_the_users_own_are_kept(algorithm: Algorithm, state: str, backend: str) -> None:
    """Through a file and several steps, of a frozen parameter too; a copy of each."""
    columns = random_columns([[(3,), (4100,)]])
    frozen = Parameter(torch.ones(5, dtype=torch.int8), requires_grad=False)
    optimizer = algorithm.simple([*columns[0], frozen], backend=backend, state=state)
    own = {"ema": torch.full((2,), 0.5, dtype=torch.float16), "tags": ["a", {"b": 1}], "rate": 0.25}
    for p in params_of(optimizer):
        optimizer.state[p].update(copy.deepcopy(own))
    for k in range(2):
        random_gradients(columns[0], seed=k)
        optimizer.step(loss=1.0)
    saved = through_file(optimizer.state_dict())
    others = [*(Parameter(p.detach().clone()) for p in columns[0])]
    other = algorithm.simple([*others, frozen], backend=backend, state=state)
    other.load_state_dict(saved)
    for k in range(2, 5):
        for each, params in ((optimizer, columns[0]), (other, others)):
            random_gradients(params, seed=k)
            each.step(loss=1.0)
    for each in (optimizer, other):
        for p in params_of(each):
            values = each.state[p]
            assert {key: values[key] for key in ("tags", "rate")} == {
                "tags": own["tags"],
                "rate": 0.25,
            }
            assert torch.equal(values["ema"], own["ema"]) and values["ema"].dtype == torch.float16
        assert set(each.state[frozen]) == set(own)
    for p, q in zip(columns[0], others, strict=True):
        assert torch.equal(p, q)
    saved["state"][0]["ema"].zero_()
    saved["state"][0]["tags"].clear()
    assert other.state[others[0]]["ema"].all() and other.state[others[0]]["tags"] == own["tags"]


def test_state_of_another_optimizer_is_none_of_the_users_own(backend: str) -> None:
    optimizer = trained(NGNM, backend, torch.float32)
    for key in ("exp_avg_sq", "exp_avg_sq_scale", "momentum_buffer_scale"):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0] |= {key: torch.zeros(3), "mine": 1}
        with pytest.raises(ValueError, match="it is from another optimizer"):
            optimizer.load_state_dict(saved)


class Linear(torch.nn.Module):
    """Parameters in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (torch.nn.Linear(3, 2) for _ in range(2))

    def optimizer(self, backend: str, **options: Any) -> Any:
        groups = [{"params": list(part.parameters())} for part in (self.one, self.two)]
        return NGNMDv1.simple(groups, backend=backend, **options)


def as_it_is(module: Linear, optimizer: Any, other: Linear, loaded: Any) -> None:
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def through_a_file(module: Linear, optimizer: Any, other: Linear, loaded: Any) -> None:
    loaded.load_state_dict(through_file(optimizer.state_dict()))


def by_name(module: Linear, optimizer: Any, other: Linear, loaded: Any, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = get_optimizer_state_dict(module, optimizer, options=options)
    set_optimizer_state_dict(other, loaded, saved, options=options)


def in_distributed_files(
    module: Linear, optimizer: Any, other: Linear, loaded: Any, flat: bool = False
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        told = get_optimizer_state_dict(module, optimizer, options=options)
        alone = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
        dcp.save({"optimizer": told}, checkpoint_id=folder, **alone)
        read = {"optimizer": get_optimizer_state_dict(other, loaded, options=options)}
        dcp.load(read, checkpoint_id=folder, **alone)
    set_optimizer_state_dict(other, loaded, read["optimizer"], options=options)


WAYS = pytest.mark.parametrize(
    "way",
    [
        *(as_it_is, through_a_file, by_name, in_distributed_files),
        pytest.param(partial(by_name, flat=True), id="by name, flattened"),
        pytest.param(partial(in_distributed_files, flat=True), id="distributed files, flattened"),
    ],
)


@pytest.mark.essential
@WAYS
@pytest.mark.parametrize("state", ["float32", "8bit"])
def test_the_count_of_skipped_steps_is_restored(
    way: Callable[..., None], state: str, backend: str
) -> None:
    """Whatever the other one has counted so far, and with more of them between and afterwards."""
    module, other = Linear(), Linear()
    optimizer, loaded = (m.optimizer(backend, state=state) for m in (module, other))

    def skip(each: Any, times: int) -> None:
        for _ in range(times):
            advance(each, 0)
            with pytest.warns(SkippedStepWarning):
                each.step(loss=NAN)
            each.zero_grad()

    skip(optimizer, 3)
    skip(loaded, 1)
    for count in (3, 5):
        way(module, optimizer, other, loaded)
        assert int(loaded.skipped_steps) == int(optimizer.skipped_steps) == count
        assert int(copy.deepcopy(loaded).skipped_steps) == count
        assert [group["ngn"] for group in loaded.param_groups] == [None, None]
        skip(loaded, 1)
        assert int(loaded.skipped_steps) == count + 1
        skip(optimizer, 2)


def test_an_older_file_was_trained_with_the_defaults_of_then() -> None:
    param = Parameter(torch.ones(3))
    saved = ngn_kernels.NGNMDv1([param], weight_decay=0.1).state_dict()
    for group in saved["param_groups"]:
        for name in ("loss_target", "decay_form"):
            del group["ngn"][name]
    with pytest.warns(UserWarning) as told:
        ngn_kernels.NGNMDv1([param], loss_target=0.8, decay_form="adamw").load_state_dict(saved)
    said = " ".join(str(warning.message) for warning in told)
    assert "had loss_target=0.0" in said and "had decay_form='paper'" in said


@WAYS
def test_options_that_differ_are_warned_of_and_stay(way: Callable[..., None], backend: str) -> None:
    module, other = Linear(), Linear()
    optimizer = module.optimizer(backend, max_grad_norm=0.5, loss_floor=-1.0)
    loaded = other.optimizer(backend, max_grad_norm=0.5)
    advance(optimizer, 0)
    for each in (optimizer, loaded):
        each.zero_grad()
    with pytest.warns(
        UserWarning, match=r"had loss_floor=-1\.0, and this .*loss_floor=0\.0: "
    ) as told:
        way(module, optimizer, other, loaded)
    (ours,) = (w for w in told if "the loaded run had" in str(w.message))
    assert ours.filename == __file__
    assert (loaded.loss_floor, loaded.max_grad_norm) == (0.0, 0.5)
    loaded.loss_floor, loaded.max_grad_norm = -1.0, None
    with pytest.warns(UserWarning, match=r"optimizer\.max_grad_norm = 0\.5 to keep"):
        way(module, optimizer, other, loaded)
    loaded.max_grad_norm = 0.5
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the loaded run had")
        way(module, optimizer, other, loaded)
    other.load_state_dict(module.state_dict())
    for k in range(3):
        advance(optimizer, k)
        advance(loaded, k)
        assert snapshot(loaded) == snapshot(optimizer)


def test_a_warning_as_an_error_changes_nothing(backend: str) -> None:
    optimizer = trained(NGNMDv1, backend, torch.float32, loss_floor=-1.0)
    other = untrained(optimizer, NGNMDv1, backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="loss_floor"):
            other.load_state_dict(optimizer.state_dict())
    assert not other.state and other.param_groups[0]["lr"] == 0.123


def test_files_without_options_are_loaded(backend: str) -> None:
    """As ZeroRedundancyOptimizer writes them."""
    optimizer = trained(NGNMDv1, backend, torch.float32, loss_floor=-1.0)
    for kept in ("gone", "None"):
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:
            group.pop("ngn") if kept == "gone" else group.update(ngn=None)
        other = untrained(optimizer, NGNMDv1, backend)
        with pytest.warns(SkippedStepWarning):
            random_gradients(params_of(other), seed=0)
            other.step(loss=NAN)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.load_state_dict(saved)
        assert int(other.skipped_steps) == 1 and snapshot(other) == snapshot(optimizer)


@pytest.mark.parametrize("count", [-1, 0.5, "many", None])
def test_a_count_of_skipped_steps_that_is_none(count: Any, backend: str) -> None:
    optimizer = trained(NGNMDv1, backend, torch.float32)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["ngn"]["skipped_steps"] = count
    with unchanged(optimizer, new_state=False), pytest.raises(ValueError, match="skipped_steps"):
        optimizer.load_state_dict(saved)


def test_load_state_dict_hooks(backend: str) -> None:
    optimizer = trained(NGNMDv1, backend, torch.float32)
    calls = []
    other = untrained(optimizer, NGNMDv1, backend)
    other.register_load_state_dict_pre_hook(lambda opt, state: calls.append("before"))
    other.register_load_state_dict_post_hook(lambda opt: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda opt, state: calls.append("saved"))
    other.load_state_dict(optimizer.state_dict())
    assert calls == ["saved", "before", "after"]
    assert snapshot(other) == snapshot(optimizer)
