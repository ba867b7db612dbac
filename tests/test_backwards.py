"""Which loss belongs to the gradients that are there, after real backward passes."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithms import NGNM, NGNMDv1
from helpers import COMPILES, FSDP2_ON_ONE_CPU, random_gradients, snapshot
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    """Each test says by itself which warning it expects."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", r"\d+ backward\(\) calls", UserWarning)
        yield


class Branches(nn.Module):
    """Three layers; a batch may leave the first or the second out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, path: str = "012") -> Tensor:
        for name in path:
            x = torch.tanh(self.layers[int(name)](x))
        return x


def batch(seed: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


class Run:
    """A model, its optimizer, and what a loop may do to them."""

    def __init__(self, backend: str = "reference", **options: Any) -> None:
        self.model = Branches()
        self.optimizer = NGNMDv1.simple(
            self.model.parameters(), lr=0.05, backend=backend, **options
        )

    def loss(self, seed: int, path: str = "012", scale: float = 1.0) -> Tensor:
        return scale * self.model(batch(seed), path).square().mean()

    def backward(self, seed: int, path: str = "012", scale: float = 1.0) -> Tensor:
        """The loss of a batch, whose gradients are added."""
        loss = self.loss(seed, path, scale)
        loss.backward()
        return loss

    def backwards(self, *seeds: int, path: str = "012") -> float:
        """Add the gradients of the mean of these batches, and return it."""
        return sum(self.backward(seed, path, 1 / len(seeds)).item() for seed in seeds)

    def plain_step(self, *seeds: int, path: str = "012") -> None:
        """A step on the mean of these batches, with its loss as argument."""
        self.optimizer.zero_grad()
        self.optimizer.step(loss=self.backwards(*seeds, path=path))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def same(one: Run, other: Run) -> bool:
    return snapshot(one.optimizer) == snapshot(other.optimizer)


def set_to_none(run: Run) -> None:
    run.model.zero_grad()


def set_to_zero(run: Run) -> None:
    run.model.zero_grad(set_to_none=False)


def by_hand(run: Run) -> None:
    for p in run.model.parameters():
        p.grad = None


CLEAR = {"none": set_to_none, "zero": set_to_zero, "by hand": by_hand}
CLEARED = pytest.mark.parametrize("clear", CLEAR.values(), ids=CLEAR)
GIVE = pytest.mark.parametrize("give", ["add_loss", "set_loss"])
FIRST = pytest.mark.parametrize("first", [False, True], ids=["given after", "given before"])


def micro_batch(
    run: Run, seed: int, give: str = "add_loss", first: bool = False, path: str = "012"
) -> None:
    loss = run.loss(seed, path, 0.5)
    if not first:
        loss.backward()
    value = loss.detach() if give == "add_loss" else 2 * loss.detach()
    getattr(run.optimizer, give)(value)
    if first:
        loss.backward()


def discard(run: Run, clear: Callable[[Run], None] = set_to_none) -> None:
    """A batch whose gradients are thrown away."""
    micro_batch(run, 100)
    clear(run)


def steps_agree(run: Run, plain: Run, k: int, give: str = "add_loss", first: bool = False) -> bool:
    """A step on two micro-batches, and the same as one plain step; whether they have the same bits."""
    micro_batch(run, 2 * k, give, first)
    micro_batch(run, 2 * k + 1, give, first)
    run.optimizer.step()
    plain.plain_step(2 * k, 2 * k + 1)
    return same(run, plain)


# Gradients that were thrown away


@CLEARED
@GIVE
@FIRST
@pytest.mark.parametrize("discarded", [1, 2])
def test_a_loss_goes_with_gradients_that_the_module_clears(
    backend: str, clear: Callable[[Run], None], give: str, first: bool, discarded: int
) -> None:
    """Batches are discarded between steps, as after an out-of-memory error."""
    run, plain = Run(backend), Run(backend)
    for k in range(3):
        for i in range(discarded):
            micro_batch(run, 100 + i, give, first)
        clear(run)
        assert steps_agree(run, plain, k, give, first)
        if k:
            clear(run)


@CLEARED
@GIVE
def test_a_loss_that_is_given_before_any_backward_outlives_a_clearing(
    backend: str, clear: Callable[[Run], None], give: str
) -> None:
    """In every iteration, also beside the gradients that a step has used."""
    run, plain = Run(backend), Run(backend)
    for k in range(3):
        loss = run.loss(k)
        getattr(run.optimizer, give)(loss)
        clear(run)
        loss.backward()
        run.optimizer.step()
        plain.plain_step(k)
        assert same(run, plain)


@CLEARED
@pytest.mark.parametrize("seen", ["01", "12"])
@pytest.mark.parametrize("discarded", ["0", "1", "01"])
def test_discarded_batches_that_reach_other_layers(
    backend: str, clear: Callable[[Run], None], discarded: str, seen: str
) -> None:
    """No parameter gets a gradient from every batch; the last ones get none at first."""
    run, plain = Run(backend), Run(backend)
    for k in range(3):
        if clear is set_to_zero:
            seen = discarded  # where only a hook on the same parameter could know
        micro_batch(run, 100, path=discarded)
        clear(run)
        micro_batch(run, 2 * k, path=seen)
        micro_batch(run, 2 * k + 1, path=seen)
        run.optimizer.step()
        if clear is set_to_zero:
            run.optimizer.zero_grad()
            plain.optimizer.zero_grad()
        plain.plain_step(2 * k, 2 * k + 1, path=seen)
        if clear is not set_to_zero:
            assert same(run, plain)
        assert float(run.optimizer.shrink) == float(plain.optimizer.shrink)
        run.model.zero_grad()


def test_zeroed_gradients_where_the_first_parameter_had_none(backend: str) -> None:
    """Only the first gradient was marked as used, and the next batch made another one."""
    run, plain = Run(backend), Run(backend)
    optimizer = run.optimizer
    run.backward(0, "2")
    optimizer.zero_grad(set_to_none=False)
    for k in range(2):
        micro_batch(run, 100, path="0")
        optimizer.zero_grad()
        assert steps_agree(run, plain, k)
        optimizer.zero_grad(set_to_none=False)


@CLEARED
def test_a_step_after_all_gradients_are_gone(backend: str, clear: Callable[[Run], None]) -> None:
    run, plain = Run(backend), Run(backend)
    for k in range(2):
        discard(run, clear)
        if clear is not set_to_zero:
            assert not run.optimizer.loss_is_pending()
            run.optimizer.step()
            assert same(run, plain)
        run.backward(k)
        with pytest.raises(RuntimeError, match="give it after zero_grad"):
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.plain_step(k)
        plain.plain_step(k)
        assert same(run, plain)


def test_dropping_the_gradients_of_one_layer_keeps_the_loss(backend: str) -> None:
    """As DINO does with its last layer during the first epoch."""
    run, plain = Run(backend), Run(backend)
    for layer in (0, 2):
        for one in (run, plain):
            one.optimizer.zero_grad()
            total = 0.0
            for seed in range(2):
                loss = one.backward(seed, scale=0.5)
                total += loss.item()
                if one is run:
                    run.optimizer.add_loss(loss)
            for p in one.model.layers[layer].parameters():
                p.grad = None
            if one is run:
                assert run.optimizer.loss_is_pending()
                run.optimizer.step()
            else:
                plain.optimizer.step(loss=total)
        assert same(run, plain)


@GIVE
def test_gradients_that_are_clipped_in_place_keep_their_loss(backend: str, give: str) -> None:
    """After each micro-batch, so that every gradient's version changes in between."""
    run, plain = Run(backend), Run(backend)
    for k in range(3):
        run.optimizer.zero_grad()
        plain.optimizer.zero_grad()
        total = 0.0
        for seed in (2 * k, 2 * k + 1):
            micro_batch(run, seed, give)
            total += plain.backward(seed, scale=0.5).item()
            for one in (run, plain):
                nn.utils.clip_grad_norm_(one.model.parameters(), 1e-3)
        run.optimizer.step()
        plain.optimizer.step(loss=total)
        assert same(run, plain)


def test_gradients_that_are_not_added_in_place_keep_their_loss(backend: str) -> None:
    """With create_graph=True, every backward() leaves new tensors."""
    run, plain = Run(backend), Run(backend)
    total = 0.0
    for seed in range(3):
        loss = run.loss(seed, scale=1 / 3)
        loss.backward(create_graph=True)
        run.optimizer.add_loss(loss)
        total += loss.item()
    run.optimizer.step()
    for seed in range(3):
        plain.loss(seed, scale=1 / 3).backward(create_graph=True)
    plain.optimizer.step(loss=total)
    assert same(run, plain)
    for one in (run, plain):
        by_hand(one)  # or its graph would keep itself alive


# Gradients that no hook sees


def test_gradients_made_by_hand_that_were_thrown_away(backend: str) -> None:
    run, plain = Run(backend), Run(backend)
    params = list(run.model.parameters())
    for k in range(3):
        random_gradients(params, seed=100)
        run.optimizer.add_loss(9.0)
        by_hand(run)
        if k == 1:
            run.optimizer.zero_grad()
            random_gradients(params, seed=k)
            run.optimizer.add_loss(1.0)
        else:
            run.optimizer.add_loss(1.0)
            random_gradients(params, seed=k)
        run.optimizer.step()
        random_gradients(plain.model.parameters(), seed=k)
        plain.optimizer.step(loss=1.0)
        assert same(run, plain)


def test_gradients_made_by_hand_after_a_real_step(backend: str) -> None:
    """The hooks saw those of the step before."""
    run, plain = Run(backend), Run(backend)
    for k in range(2):
        assert steps_agree(run, plain, k)
        random_gradients(run.model.parameters(), seed=100)
        run.optimizer.add_loss(9.0)
        run.optimizer.zero_grad()
        random_gradients(run.model.parameters(), seed=k)
        run.optimizer.add_loss(1.0)
        run.optimizer.step()
        random_gradients(plain.model.parameters(), seed=k)
        plain.optimizer.step(loss=1.0)
        assert same(run, plain)
        run.model.zero_grad()


def test_gradients_changed_by_hand_are_new_ones(backend: str) -> None:
    """In place, after a step or zero_grad() has left them there."""
    run, plain = Run(backend), Run(backend)
    for one in (run, plain):
        random_gradients(one.model.parameters(), seed=0)
    for k in range(2):
        for value in (9.0, 1.0):
            run.optimizer.zero_grad(set_to_none=False)
            for p in run.model.parameters():
                assert p.grad is not None
                p.grad.add_(k + 1)
            run.optimizer.add_loss(value)
        run.optimizer.step()
        for p in plain.model.parameters():
            p.grad = torch.full_like(p, k + 1)
        plain.optimizer.step(loss=1.0)
        assert same(run, plain)


def test_one_gradient_made_by_hand_beside_used_ones(backend: str) -> None:
    run, plain = Run(backend), Run(backend)
    for k in range(3):
        for one in (run, plain):
            random_gradients(one.model.parameters(), seed=k)
        run.optimizer.add_loss(1.0)
        run.optimizer.step()
        plain.optimizer.step(loss=1.0)
        assert same(run, plain)
        run.model.layers[2].bias.grad = torch.ones(4)
        run.optimizer.add_loss(9.0)
        run.optimizer.zero_grad()


# The witness


def hooks_of(run: Run) -> list[int]:
    return [
        len(p._backward_hooks or ()) + len(getattr(p, "_post_accumulate_grad_hooks", None) or ())
        for p in run.model.parameters()
    ]


def test_two_hooks_on_one_parameter(backend: str) -> None:
    run = Run(backend)
    assert hooks_of(run) == [2, 0, 0, 0, 0, 0]
    for k in range(3):
        run.plain_step(k)
        micro_batch(run, k)
        run.optimizer.step()
    assert hooks_of(run) == [2, 0, 0, 0, 0, 0]
    del run.optimizer
    gc.collect()
    assert hooks_of(run) == [0] * 6


def test_another_witness_is_chosen_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches take one of two branches: after a few, the layer that both go through is watched."""
    run = Run(backend)
    moves: list[int] = []
    hook = Tensor.register_hook
    monkeypatch.setattr(
        Tensor, "register_hook", lambda self, f: (moves.append(1), hook(self, f))[1]
    )
    for k in range(20):
        run.plain_step(k, path="02" if k % 2 else "12")
    assert hooks_of(run)[4:] == [2, 0] and len(moves) <= 4
    for k in range(3):
        run.backward(k, "12", 1 / 3)
    with pytest.warns(UserWarning, match=r"4 backward\(\) calls"):
        loss = run.backward(9, "02")
        run.optimizer.step(loss=loss)


def test_frozen_and_removed_parameters_are_no_witnesses(backend: str) -> None:
    run, plain = Run(backend), Run(backend)
    first, second = run.model.layers[0].weight, run.model.layers[0].bias
    for one in (run, plain):
        one.plain_step(0)
        one.optimizer.zero_grad()
        one.model.layers[0].weight.requires_grad_(False)
    for k in range(2):
        discard(run)
        assert steps_agree(run, plain, k)
        run.model.zero_grad()
    assert not first._backward_hooks and second._backward_hooks
    for one in (run, plain):
        del one.optimizer.param_groups[0]["params"][:2]
        one.model.layers[0].requires_grad_(False)
    for k in range(2):
        discard(run)
        assert steps_agree(run, plain, k)
        run.model.zero_grad()
    assert hooks_of(run) == [0, 0, 2, 0, 0, 0]


@pytest.mark.parametrize("cleared", [True, False])
def test_a_removed_parameter_is_not_kept_alive(backend: str, cleared: bool) -> None:
    params = [Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = NGNM.simple(params, lr=0.1, backend=backend)
    for _ in range(2):
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        optimizer.add_loss(loss)
        optimizer.step()
    if cleared:
        optimizer.zero_grad(set_to_none=False)
    gone = weakref.ref(params[0])
    del optimizer.param_groups[0]["params"][0], loss
    optimizer.state.pop(params.pop(0))
    loss = params[0].square().sum()
    loss.backward()
    optimizer.step(loss=loss.detach())
    del loss
    gc.collect()
    assert gone() is None


def test_swapped_parameters_are_watched_again() -> None:
    """module.double() swaps tensors there, which refuses those that have weak references."""
    run, plain = Run(), Run()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for k in range(4):
            discard(run)
            assert steps_agree(run, plain, k)
            if k == 1:
                for one in (run, plain):
                    one.optimizer.zero_grad()
                    one.model.double().float()
            run.model.zero_grad()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert sum(hooks_of(run)) == 2


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda both: pickle.loads(pickle.dumps(both))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_have_hooks_of_their_own(backend: str, copied: Callable[[Any], Any]) -> None:
    run, plain = Run(backend), Run(backend)
    run.plain_step(0)
    plain.plain_step(0)
    micro_batch(run, 100)
    other = Run(backend)
    other.model, other.optimizer = copied((run.model, run.optimizer))
    assert hooks_of(other) == hooks_of(run) == [2, 0, 0, 0, 0, 0]
    other.optimizer.drop_loss()
    for k in range(2):
        discard(other)
        assert steps_agree(other, plain, k)
        other.model.zero_grad()


def test_plain_tensors_are_saved_without_a_warning() -> None:
    x = torch.ones(3, requires_grad=True)
    optimizer = NGNM.simple([x])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(pickle.loads(pickle.dumps(x)), x)
        reduce_tensor(x)
    assert x._backward_hooks and optimizer.param_groups


def test_lazy_and_empty_parameters(backend: str) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    optimizer = NGNM.simple(model.parameters(), lr=0.1, backend=backend)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    empty = Parameter(torch.ones(0))
    optimizer = NGNM.simple([empty], lr=0.1, backend=backend)
    assert not empty._backward_hooks
    optimizer.add_param_group({"params": [Parameter(torch.ones(2), requires_grad=False)]})
    assert optimizer.step() is None


def test_a_tensor_that_is_no_leaf(backend: str) -> None:
    """torch's optimizers take one that retains its gradient; hooks of the second kind do not."""
    leaf = torch.ones(3, requires_grad=True)
    inner = leaf * 2
    inner.retain_grad()
    optimizer = NGNM.simple([inner], lr=0.1, backend=backend)
    inner.square().sum().backward()
    optimizer.step(loss=1.0)
    assert inner.tolist() != [2, 2, 2]


def test_gradients_on_a_device_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """There nobody knows what an operation in place has done: no loss is dropped, none refused."""
    monkeypatch.setattr("ngn_kernels.backwards.is_zero", lambda grad: None)
    run, plain = Run(), Run()
    micro_batch(run, 0)
    nn.utils.clip_grad_norm_(run.model.parameters(), 10.0)
    micro_batch(run, 1)
    run.optimizer.step()
    plain.plain_step(0, 1)
    assert same(run, plain)
    run.optimizer.zero_grad()
    for _ in range(2):
        run.backward(3)
        set_to_zero(run)
    run.optimizer.step(lambda: run.backward(4))
    plain.plain_step(4)
    assert same(run, plain)


def test_an_interrupted_pass_is_not_counted(backend: str) -> None:
    run, plain = Run(backend), Run(backend)
    for stop in (run.model.layers[2].weight, run.model.layers[0].weight):
        handle = stop.register_hook(lambda grad: 1 / 0)
        for first in (False, True):
            with pytest.raises(ZeroDivisionError):
                micro_batch(run, 100, first=first)
        handle.remove()
        run.optimizer.drop_loss()
        run.model.zero_grad()
        loss = run.backward(0)
        run.optimizer.step(loss=loss)
        plain.plain_step(0)
        assert same(run, plain)
        run.model.zero_grad()


def test_state_is_loaded_beside_the_hooks(backend: str) -> None:
    run = Run(backend)
    run.plain_step(0)
    saved = run.optimizer.state_dict()
    run.optimizer.load_state_dict(saved)
    assert hooks_of(run) == [2, 0, 0, 0, 0, 0]


# How many backward passes a loss belongs to


def test_the_loss_of_one_of_several_backwards_is_warned_of_once(backend: str) -> None:
    run = Run(backend)
    for step in range(3):
        run.optimizer.zero_grad()
        for seed in range(8):
            loss = run.backward(seed, scale=1 / 8)
        if step:
            run.optimizer.step(loss=loss)
            continue
        with pytest.warns(UserWarning, match=r"8 backward\(\) calls.*add_loss\(loss / n\)") as said:
            run.optimizer.step(loss=loss)
        assert [Path(w.filename).name for w in said] == [Path(__file__).name]


def test_a_closure_returns_the_loss_of_one_of_several_backwards(backend: str) -> None:
    """As Lightning's, where each window of micro-batches ends in a step with a closure."""
    run, plain = Run(backend), Run(backend)
    run.plain_step(0)
    plain.plain_step(0)
    run.optimizer.zero_grad()
    for seed in range(7):
        run.backward(seed, scale=1 / 8)

    says = r"7 backward\(\) calls.*callbacks=\[ngn_kernels\.trainers\.FeedLoss\(\)\].*add_loss"
    with pytest.raises(RuntimeError, match=says):
        run.optimizer.step(lambda: run.backward(7, scale=1 / 8).detach())
    assert same(run, plain)
    run.plain_step(1)
    plain.plain_step(1)
    assert same(run, plain)


@pytest.mark.parametrize("clear", [*CLEAR.values(), Run.zero_grad], ids=[*CLEAR, "optimizer"])
def test_closures_that_clear_are_not_refused(backend: str, clear: Callable[[Run], None]) -> None:
    """Whatever was there before, and however often the closure is called."""
    run, plain = Run(backend), Run(backend)
    for k in range(3):
        for seed in range(3):
            run.backward(seed)  # as a line search or an estimate might

        def closure(seed: int = k) -> Any:
            clear(run)
            return run.backward(seed)

        closure()
        run.optimizer.step(closure)
        plain.plain_step(k)
        assert same(run, plain)


def test_closures_without_a_backward(backend: str) -> None:
    run, plain = Run(backend), Run(backend)
    for k in range(2):
        run.optimizer.zero_grad()
        loss = run.backward(k)
        run.optimizer.step(lambda loss=loss: loss)
        plain.plain_step(k)
        run.optimizer.zero_grad()
        total = run.backwards(0, 1, 2)
        run.optimizer.step(lambda total=total: total)
        plain.plain_step(0, 1, 2)
        assert same(run, plain)


def test_a_pending_loss_is_of_all_backwards(backend: str) -> None:
    run, plain = Run(backend), Run(backend)
    for k in range(2):
        run.optimizer.zero_grad()
        micro_batch(run, 2 * k)

        def closure(seed: int = 2 * k + 1) -> Any:
            micro_batch(run, seed)
            return torch.tensor(7.0, requires_grad=True)

        run.optimizer.step(closure)
        plain.plain_step(2 * k, 2 * k + 1)
        assert same(run, plain)


def test_a_loss_beside_a_closure_that_returns_none(backend: str) -> None:
    """As Lightning's manual optimization calls it; a loss of the closure's own is a second one."""
    run, plain = Run(backend), Run(backend)
    for k in range(2):
        run.optimizer.zero_grad()
        loss = run.backward(k)
        assert run.optimizer.step(lambda: None, loss=loss) is loss
        plain.plain_step(k)
        assert same(run, plain)
    run.backward(5)
    for closure in (lambda: 1.0, lambda: run.optimizer.add_loss(1.0)):
        with pytest.raises(RuntimeError, match="two sources"):
            run.optimizer.step(closure, loss=1.0)
        assert same(run, plain)
    run.optimizer.step(loss=1.0)


def sums_are_detached(run: Run) -> Tensor:
    return (run.backward(0) + run.backward(1)).detach()


def numbers(run: Run) -> float:
    return sum(run.backward(seed).item() for seed in range(3))


def gradient_penalty(run: Run) -> Tensor:
    x = batch(0).requires_grad_()
    out = run.model(x).square().mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    others = torch.autograd.grad(out, list(run.model.parameters()), create_graph=True)
    loss = out + slope.square().sum() + sum(g.square().sum() for g in others)
    loss.backward()
    return loss


def retained_graph(run: Run) -> Tensor:
    loss = run.loss(0)
    torch.autograd.grad(loss, list(run.model.parameters()), retain_graph=True)
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, list(run.model.parameters()), retain_graph=True)
    return loss


def tied_weights(run: Run) -> Tensor:
    return run.backward(0, "0012100")


def checkpointed(run: Run, reentrant: bool, path: str) -> Tensor:
    x = batch(0).requires_grad_()
    for name in path:
        x = checkpoint(run.model, x, name, use_reentrant=reentrant)
    loss = run.model(x, "0").square().mean()
    loss.backward()
    return loss


def reentrant_checkpoints(run: Run) -> Tensor:
    """The first layer's gradient is added to five times in one backward()."""
    return checkpointed(run, True, "00120")


def nested_checkpoints(run: Run) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(run.model, run.model(x, "0"), "01", use_reentrant=True)

    x = checkpoint(inner, batch(0).requires_grad_(), use_reentrant=True)
    loss = checkpoint(inner, x, use_reentrant=True).square().mean()
    loss.backward()
    return loss


def other_checkpoints(run: Run) -> Tensor:
    return checkpointed(run, False, "00120")


def discarded_batches(run: Run) -> Tensor:
    for clear in CLEAR.values():
        run.backward(1)
        clear(run)
    return run.backward(0)


def line_search(run: Run) -> Tensor:
    for _ in range(3):
        run.optimizer.zero_grad()
        loss = run.backward(0)
    return loss


def adversaries(run: Run) -> Tensor:
    """The generator's backward() reaches the judge, whose gradients its module clears."""
    made = nn.Linear(4, 4)
    generator = NGNM.simple(made.parameters(), lr=0.1, backend="reference")
    loss = run.model(made(batch(0))).square().mean()
    loss.backward()
    generator.step(loss=loss)
    run.model.zero_grad()
    real, fake = run.backward(0), run.model(made(batch(0)).detach()).square().mean()
    fake.backward()
    return (real + fake).detach()


LEGITIMATE = (
    *(sums_are_detached, numbers, gradient_penalty, retained_graph, tied_weights),
    *(reentrant_checkpoints, nested_checkpoints, other_checkpoints, discarded_batches),
    *(line_search, adversaries),
)


@pytest.mark.parametrize("loop", LEGITIMATE, ids=lambda loop: loop.__name__)
def test_loops_that_are_right_are_not_warned_of(loop: Callable[[Run], None], backend: str) -> None:
    run = Run(backend)
    for _ in range(3):
        run.optimizer.zero_grad()
        run.optimizer.step(loss=loop(run))
    assert float(run.optimizer.state[run.model.layers[0].weight]["step"]) >= 3


@pytest.mark.parametrize("path", ["00120", "120", "12"])
def test_backwards_with_checkpoints_inside_are_counted(path: str, backend: str) -> None:
    run = Run(backend)
    if path == "12":
        run.model.layers[0].requires_grad_(False)
        run.plain_step(0)
        run.optimizer.zero_grad()
    for _ in range(3):
        loss = checkpointed(run, True, path)
    with pytest.warns(UserWarning, match=r"^3 backward"):
        run.optimizer.step(loss=loss)


def test_gradients_that_are_new_tensors_are_counted(backend: str) -> None:
    run = Run(backend)
    for _ in range(2):
        loss = run.loss(0)
        loss.backward(create_graph=True)
    with pytest.warns(UserWarning, match=r"^2 backward"):
        run.optimizer.step(loss=loss)
    by_hand(run)


# Data-parallel wrappers of one process


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("view", [True, False], ids=["view", "no view"])
@pytest.mark.parametrize("no_sync", [True, False], ids=["no_sync", "sync"])
@CLEARED
def test_ddp_replaces_gradients(view: bool, no_sync: bool, clear: Callable[[Run], None]) -> None:
    """With gradient_as_bucket_view, .grad becomes a view of a bucket during backward()."""
    run, plain = Run(), Run()
    model = nn.parallel.DistributedDataParallel(
        run.model, gradient_as_bucket_view=view, find_unused_parameters=False
    )
    for k in range(3):
        for seeds in ([100, 101], [2 * k, 2 * k + 1]):
            for seed in seeds:
                held = no_sync and seed == seeds[0]
                with model.no_sync() if held else contextlib.nullcontext():
                    loss = model(batch(seed)).square().mean() / 2
                    loss.backward()
                run.optimizer.add_loss(loss)
            if seeds[0] == 100:
                clear(run)
        run.optimizer.step()
        plain.plain_step(2 * k, 2 * k + 1)
        assert float(run.optimizer.shrink) == pytest.approx(float(plain.optimizer.shrink))
        clear(run)
    for _ in range(2):
        loss = model(batch(0)).square().mean()
        loss.backward()
    with pytest.warns(UserWarning, match=r"^2 backward"):
        run.optimizer.step(loss=loss)


@FSDP2_ON_ONE_CPU
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("hooked", [True, False], ids=["hooks run", "no hooks"])
@pytest.mark.parametrize("clear", [set_to_none, by_hand])
def test_fsdp_adds_to_gradients_by_itself(
    hooked: bool, clear: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of it call no hook at all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    run, plain = Run(), Run()
    fully_shard(run.model, mesh=init_device_mesh("cpu", (1,)))
    run.optimizer = NGNMDv1.simple(run.model.parameters(), lr=0.05, backend="reference")
    if not hooked:
        for p in run.model.parameters():
            p._post_accumulate_grad_hooks = None
    for k in range(3):
        for first in (100, 2 * k):
            for seed in (first, first + 1):
                loss = run.backward(seed, scale=0.5)
                run.optimizer.add_loss(loss)
            if first == 100:
                clear(run)
        run.optimizer.step()
        plain.plain_step(2 * k, 2 * k + 1)
        assert float(run.optimizer.shrink) == pytest.approx(float(plain.optimizer.shrink))
        clear(run)
    for _ in range(2):
        loss = run.backward(0)
    if hooked:
        with pytest.warns(UserWarning, match=r"^2 backward"):
            run.optimizer.step(loss=loss)
    else:
        run.optimizer.step(loss=loss)


# torch.compile

COMPILED = """
import sys
import torch, ngn_kernels
from torch._dynamo.utils import counters
torch.manual_seed(0)
whole, autograd = sys.argv[1] == "whole", sys.argv[1] == "autograd"
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
twin = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
twin.load_state_dict(model.state_dict())
optimizers = [ngn_kernels.NGNMDv1(m.parameters(), backend="reference") for m in (model, twin)]
x = torch.randn(4, 8)

def train(model, optimizer):  # no loop: torch.compile leaves one with a break of the graph alone
    loss = model(x).square().mean() / 2
    loss.backward()
    optimizer.add_loss(loss)
    loss = model(2 * x).square().mean() / 2
    loss.backward()
    optimizer.add_loss(loss)
    optimizer.step()
    optimizer.zero_grad()

def forward(x):
    return model(x)

compiled = torch.compile(train if whole else forward, backend="aot_eager")
graphs = []
for k in range(5):
    if whole:
        compiled(model, optimizers[0])
    elif autograd:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            train(compiled, optimizers[0])
    else:
        train(compiled, optimizers[0])
    train(twin, optimizers[1])
    graphs.append(counters["stats"]["unique_graphs"])
assert all(map(torch.allclose, model.parameters(), twin.parameters()))
assert 0 < graphs[2] == graphs[4], graphs
inside = ("_getframe", "_current_graph_task_id", "_current_autograd_node")  # the hooks
assert not [r for r in counters["graph_break"] if any(name in r for name in inside)]
"""


@COMPILES
@pytest.mark.parametrize("what", ["model", "whole", "autograd"])
def test_compiled_code_is_not_compiled_again(what: str, tmp_path: Path) -> None:
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(script), what]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("change", ["clipping", "averaging"])
def test_a_gradient_of_zero_is_not_one_that_was_zeroed(change: str, backend: str) -> None:
    """As of an unused parameter, a new adapter or a head of zeros: others change it in place."""
    unused, w = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer = NGNM.simple([unused, w], lr=0.1, backend=backend)
    alone = NGNM.simple([v := Parameter(torch.ones(3))], lr=0.1, backend=backend)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(4):
            loss = (w.square().sum() + 0 * unused.sum()) / 4
            loss.backward()
            optimizer.add_loss(loss)
            if change == "clipping":
                torch.nn.utils.clip_grad_norm_([unused, w], 1e9)
            else:
                for p in (unused, w):
                    p.grad.mul_(1.0)
        optimizer.step()
        alone.zero_grad()
        whole = v.square().sum()
        whole.backward()
        alone.step(loss=whole.detach())
        assert float(optimizer.shrink) == pytest.approx(float(alone.shrink), rel=1e-6)
