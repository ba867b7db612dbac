"""Several buckets and several devices in one step: one denominator, and one count of a bad step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from algorithms import EVERY, NGNM, SCALAR, Algorithm, Hyper, NGNMDv1, NGNMDv2
from helpers import (
    OWN_GRADIENT_TYPES,
    assert_unchanged,
    params_of,
    random_columns,
    random_gradients,
    snapshot,
    warnings_of,
)
from pair import Pair
from steps import check_next_step, train
from torch import Tensor

from ngn_kernels import SkippedStepWarning
from ngn_kernels.distributed.exchange import Ranks
from ngn_kernels.layout import Reason
from ngn_kernels.planning import plan
from ngn_kernels.planning.rows import BucketKey
from ngn_kernels.skips import WARNINGS

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HYPERS = (Hyper(0.3), Hyper(0.05, 0.5, 0.99), Hyper(0.1, 0.8, 0.99, 1e-4, 0.1))


def three_buckets(algorithm: Algorithm, backend: str, **options: Any) -> Any:
    """An optimizer after a step; a group, and a bucket, for each type."""
    columns = [random_columns([[(3,), (5, 7)]], dtype)[0] for dtype in DTYPES]
    optimizer = algorithm.build(columns, HYPERS, backend=backend, **options)
    train(optimizer, 0)
    random_gradients(params_of(optimizer), seed=1)
    return optimizer


def warned(step: Callable[[], Any]) -> list[str]:
    return warnings_of(step, SkippedStepWarning)


def assert_counted_once(algorithm: Algorithm, optimizer: Any, loss: float, reason: Reason) -> None:
    """The next step is skipped, in whole or in part; the two after it are good ones."""
    count = int(optimizer.skipped_steps)
    name = type(optimizer).__name__
    (said,) = warned(lambda: optimizer.step(loss=loss))
    assert said.startswith(f"{name}: {WARNINGS[reason]}")
    assert int(optimizer.skipped_steps) == count + 1
    for seed in (5, 6):
        check_next_step(algorithm, optimizer, seed=seed, loss=1.0)
        assert int(optimizer.skipped_steps) == count + 1
    random_gradients(params_of(optimizer), seed=7)


@pytest.mark.essential
@EVERY
def test_skips_of_a_bad_loss_are_counted_once(algorithm: Algorithm, backend: str) -> None:
    optimizer = three_buckets(algorithm, backend)
    before = snapshot(optimizer)
    assert len(warned(lambda: optimizer.step(loss=NAN))) == 1
    assert_unchanged(optimizer, before)
    assert_counted_once(algorithm, optimizer, NAN, Reason.LOSS_NOT_FINITE)


@pytest.mark.essential
@EVERY
@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_skips_of_a_bad_gradient_are_counted_once(
    algorithm: Algorithm, backend: str, bucket: int
) -> None:
    """Whichever bucket it is in: the first or the last to be applied, or between them."""
    optimizer = three_buckets(algorithm, backend)
    params_of(optimizer)[2 * bucket].grad[1] = NAN
    reason = Reason.ELEMENTS_KEPT if algorithm.coordinate else Reason.GRADIENT_NOT_FINITE
    before = snapshot(optimizer)
    x = [p.detach().clone() for p in params_of(optimizer)]
    assert_counted_once(algorithm, optimizer, 1.0, reason)
    assert all(p.isfinite().all() for p in params_of(optimizer))
    assert not all(map(torch.equal, params_of(optimizer), x)) and snapshot(optimizer) != before


@EVERY
def test_unusual_gradients_in_every_bucket(algorithm: Algorithm, backend: str) -> None:
    """In another memory order than their parameters."""
    optimizer = three_buckets(algorithm, backend)
    for p in params_of(optimizer):
        if p.dim() == 2:
            p.grad = p.grad.t().contiguous().t()
    Pair(algorithm, optimizer).checked_step(0.7)


@OWN_GRADIENT_TYPES
def test_gradients_that_turn_to_another_type(backend: str) -> None:
    optimizer = three_buckets(NGNMDv1, backend)
    for k, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16)):
        random_gradients(params_of(optimizer), seed=k, dtype=dtype)
        Pair(NGNMDv1, optimizer).checked_step(0.7)


# Two devices, as far as a plan knows: both are the host, so that the numbers are real.


@pytest.fixture(params=[0, 1, None], ids=["home first", "home second", "nothing at home"])
def two_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Every second parameter lies on the other one, and the home device is one of them or a third."""
    known: dict[int, int] = {}
    of = BucketKey.of.__func__  # type: ignore[attr-defined]

    def placed(cls: type[BucketKey], param: Tensor, *args: Any) -> BucketKey:
        number = known.setdefault(id(param), len(known))
        key: BucketKey = of(cls, param, *args)
        return key._replace(device=torch.device("cpu", number % 2))

    monkeypatch.setattr(BucketKey, "of", classmethod(placed))
    home = torch.device("cpu") if request.param is None else torch.device("cpu", request.param)
    monkeypatch.setattr(plan, "home_device", lambda groups: home)
    yield 3 if request.param is None else 2


@EVERY
@pytest.mark.parametrize("clipping", [None, 0.5], ids=["", "clipping"])
def test_devices_share_one_denominator(
    algorithm: Algorithm, backend: str, clipping: float | None, two_devices: int
) -> None:
    optimizer = three_buckets(algorithm, backend, max_grad_norm=clipping)
    assert len(optimizer._plan.devices) == two_devices
    for k in range(2):
        random_gradients(params_of(optimizer), seed=k, norm=3.0)
        Pair(algorithm, optimizer, max_grad_norm=clipping).checked_step(0.7)


@EVERY
@pytest.mark.parametrize("bad", range(6))
@pytest.mark.usefixtures("two_devices")
def test_skips_on_two_devices_are_counted_once(
    algorithm: Algorithm, backend: str, bad: int
) -> None:
    optimizer = three_buckets(algorithm, backend)
    params_of(optimizer)[bad].grad.view(-1)[1] = NAN
    reason = Reason.ELEMENTS_KEPT if algorithm.coordinate else Reason.GRADIENT_NOT_FINITE
    assert_counted_once(algorithm, optimizer, 1.0, reason)
    assert_counted_once(algorithm, optimizer, NAN, Reason.LOSS_NOT_FINITE)


# What is told of a step


@pytest.mark.parametrize("algorithm", SCALAR, ids=str)
def test_telemetry_stays_when_a_group_comes(algorithm: Algorithm, backend: str) -> None:
    """It is of the last step that was applied, and the one after the new group was not."""
    optimizer = three_buckets(algorithm, backend)
    shrink, sizes = float(optimizer.shrink), list(map(float, optimizer.step_sizes()))
    (new,) = random_columns([[(4,)]])
    optimizer.add_param_group({"params": new})
    new[0].grad = torch.ones(4)
    assert len(warned(lambda: optimizer.step(loss=NAN))) == 1
    assert float(optimizer.shrink) == shrink
    *known, unknown = map(float, optimizer.step_sizes())
    assert known == sizes and unknown != unknown


@pytest.mark.essential
@pytest.mark.parametrize("algorithm", SCALAR, ids=str)
def test_copies_bring_their_part_of_the_sums(
    algorithm: Algorithm, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements that lie on two ranks bring half of their sums: as twice the loss would."""
    doubled = three_buckets(algorithm, backend)
    halved = three_buckets(algorithm, backend)
    monkeypatch.setattr(Ranks, "replicas_of", lambda self, param, label: 2)
    halved._plan = None
    halved.step(loss=0.3)
    doubled.step(loss=0.6)
    torch.testing.assert_close(halved.shrink, doubled.shrink, rtol=1e-12, atol=0)
    assert 0 < float(halved.shrink) < 1


def test_three_types_are_three_buckets_of_one_step(backend: str) -> None:
    """Without which the tests above would say nothing."""
    for algorithm in (NGNM, NGNMDv2):
        optimizer = three_buckets(algorithm, backend)
        keys = [bucket.key for bucket in optimizer._plan.buckets]
        assert [key.param for key in keys] == list(DTYPES)
