"""The compiled kernels of the GPU engines, run by a simulator: whole optimizers against the oracle.

Triton binds, specialises, compiles and caches as it does on a GPU, the CUDA engine loads its image and
packs its arguments: only the GPU is simulated, and CUDA's driver stood in for. Each access is checked for
bounds and alignment, and counted; gradients and tables are read-only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from algorithms import (
    ALGORITHMS,
    EVERY,
    EVERY_BUCKET,
    NGNM,
    Algorithm,
    NGNMDv1,
    NGNMDv1W,
    NGNMDv2,
    NGNMuon,
)
from gpu_engines import EACH_ENGINE, EVERY_TARGET, on, simulated
from helpers import (
    bits,
    params_of,
    random_columns,
    random_gradients,
    snapshot,
    unchanged,
)
from pair import Pair
from ptxsim.traffic import column_bytes
from steps import train
from torch import Tensor
from torch.nn import Parameter

import ngn_kernels.backends as backends
from ngn_kernels import formats
from ngn_kernels.layout import Column, Input
from ngn_kernels.options import SAVED_OPTIONS
from ngn_kernels.planning.tables import Inputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Below a vector, tails, more than one block of a chunk, more than one chunk.
SHAPES = ([(), (3,), (1030,), (5, 7)], [(4101,), (0,), (64, 32)])
ORDERS = (("reversed", 0), ("random", 1), ("interleaved", 2), ("interleaved", 3))


@pytest.fixture(params=EACH_ENGINE)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stands in for the GPU, of each engine; tests that care name the architectures."""
    with simulated(request.param, monkeypatch) as stand_in:
        yield stand_in


def steps(
    gpu: Any, algorithm: Algorithm, columns: list[list[Tensor]], count: int = 2, **options: Any
) -> Iterator[Pair]:
    """Some steps, each from the state of the one before and checked against the oracle."""
    known = {k: v for k, v in options.items() if k in SAVED_OPTIONS}
    pair = Pair(algorithm, algorithm.build(columns, backend=gpu.name, **options), **known)
    for k in range(count):
        random_gradients(params_of(pair.optimizer), seed=k, norm=2.0)
        yield pair
        pair.checked_step(0.6 + k)


def run(pairs: Iterator[Pair]) -> Pair:
    *_, last = pairs
    return last


COLUMNS = ("x", "g", "d", "m", "v", "m_scale", "v_scale", "remainder")


def element_bytes(launches: list[Any]) -> int:
    """All bytes of parameters, gradients and state that were moved."""
    moved = column_bytes(launches).values()
    return sum(size for by in moved for name, size in by.items() if name.split()[1] in COLUMNS)


def check_sectors(launches: list[Any]) -> None:
    for launched in launches:
        for sectors, size in (
            (launched.traffic.read_sectors, launched.traffic.read),
            (launched.traffic.written_sectors, launched.traffic.written),
        ):
            for name in size:
                if name.rstrip("0123456789") in COLUMNS:
                    assert 32 * sectors[name] == size[name], f"{name} is not moved in whole sectors"


def bytes_per_parameter(algorithm: Algorithm, dtype: torch.dtype) -> int:
    """All passes together."""
    return sum(dtype.itemsize if column in "xg" else 4 for column in "".join(algorithm.traffic))


@EVERY
@on(*EVERY_TARGET)
def test_every_rule(algorithm: Algorithm, gpu: Any) -> None:
    run(steps(gpu, algorithm, random_columns(SHAPES)))
    assert {launched.kernel for launched in gpu.launches} == (
        {"apply"} if algorithm.coordinate else {"reduce", "apply"}
    )


@EVERY
def test_a_target_and_a_cap(algorithm: Algorithm, gpu: Any) -> None:
    """With AdamW's form of decay, where a rule has it."""
    form = "paper" if algorithm.name == "NGNMDv1W" else "adamw"
    options = {"max_grad_norm": 1.0, "loss_target": 0.8, "decay_form": form}
    pairs = steps(gpu, algorithm, random_columns(SHAPES), 3, **options)
    for pair, cap in zip(pairs, (None, 0.05, 8.0), strict=True):
        pair.optimizer.param_groups[1]["step_cap"] = cap
    norm = torch.cat([p.grad.flatten() for p in params_of(pair.optimizer)]).norm()
    assert float(pair.optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("state", ["float32", "8bit"])
def test_nesterov(state: str, gpu: Any) -> None:
    """In spectral groups and others."""
    options = {"decay_form": "adamw", "nesterov": True, "max_grad_norm": 1.0, "state": state}
    run(
        steps(gpu, NGNMuon, random_columns(([(70, 65), (5, 7)], [(4101,), (64, 65)])), 3, **options)
    )


@EVERY
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_rule_in_low_precision(algorithm: Algorithm, dtype: torch.dtype, gpu: Any) -> None:
    run(steps(gpu, algorithm, random_columns(SHAPES, dtype), max_grad_norm=1.0))


@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1W, NGNMDv2], ids=str)
def test_mixed_types_share_one_denominator(algorithm: Algorithm, gpu: Any) -> None:
    columns = [
        random_columns([[(300,), (5,)]], dtype, seed=i)[0] for i, dtype in enumerate(DTYPES[:2])
    ]
    run(steps(gpu, algorithm, columns, max_grad_norm=0.5))


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch ties the two dtypes")
@pytest.mark.parametrize("algorithm", [NGNM, NGNMDv1W, NGNMDv2], ids=str)
@pytest.mark.parametrize(("param", "grad"), list(permutations(DTYPES, 2)), ids=str)
def test_gradients_of_another_type(
    algorithm: Algorithm, param: torch.dtype, grad: torch.dtype, gpu: Any
) -> None:
    columns = random_columns([[(1030,)], [(4101,)]], param)
    optimizer = algorithm.build(columns, backend=gpu.name)
    pair = Pair(algorithm, optimizer)
    random_gradients(params_of(optimizer), seed=0, dtype=grad)
    pair.checked_step(0.7)


@EVERY_BUCKET
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_chunks_of_a_large_model(
    algorithm: Algorithm, dtype: torch.dtype, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block goes through its chunk in several turns, and through an odd end."""
    monkeypatch.setattr("ngn_kernels.backends.gpu.SMALLEST_CHUNK", 8192)
    run(steps(gpu, algorithm, random_columns([[(8192,), (19_001,)], [(5000,)]], dtype), count=1))
    assert {launched.blocks for launched in gpu.launches} == {1 + 3 + 1}


@EVERY_BUCKET
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_offsets_beyond_32_bits(algorithm: Algorithm, dtype: torch.dtype, gpu: Any) -> None:
    """The last elements of tensors whose first ones would lie far before them in memory."""
    optimizer = algorithm.build(
        random_columns([[(2100,)], [(4101,), (3,)]], dtype), backend=gpu.name
    )
    train(optimizer, 0)
    pair = Pair(algorithm, optimizer)
    pair.expect(1.0)
    plan = optimizer._plan
    (bucket,), (prepared,) = plan.buckets, plan._prepared
    begin = 3 << 31
    prepared.host_chunks[:, 1] += begin
    bucket.table[Column.NUMEL] += begin
    widths = {Column.X: dtype.itemsize, Column.G: dtype.itemsize, Column.M: 4, Column.V: 4}
    widths |= {Column.D: 4} if algorithm.spectral else {}
    for column, width in widths.items():
        bucket.table[column] -= begin * width
    for index in range(len(plan.rounds)):
        prepared.reduce(index)
    prepared.apply(last=True)
    pair.check_step()


@pytest.mark.parametrize(("algorithm", "tensors"), [(NGNMDv2, 260), (NGNM, 1030)], ids=str)
def test_more_tensors_than_a_block(algorithm: Algorithm, tensors: int, gpu: Any) -> None:
    """Step counts are advanced 256 at a time, partial sums are added 1,024 at a time."""
    half = [(1,)] * (tensors // 2)
    run(steps(gpu, algorithm, random_columns([half, half]), count=1))


@EVERY
def test_amp_and_clipping(algorithm: Algorithm, gpu: Any) -> None:
    optimizer = algorithm.build(random_columns(SHAPES), backend=gpu.name, max_grad_norm=0.7)
    pair = Pair(algorithm, optimizer, max_grad_norm=0.7)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(512.0), torch.tensor(0.0)
    random_gradients(params_of(optimizer), seed=0, norm=1024.0)
    pair.step(1.5, grad_scale=512.0)
    pair.check_step()


@EVERY_BUCKET
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes(algorithm: Algorithm, dtype: torch.dtype, gpu: Any) -> None:
    """Exactly the traffic of the design's table, and vectors all the way."""
    sizes = (8192, 4096)
    run(steps(gpu, algorithm, random_columns([[(n,)] for n in sizes], dtype), count=1))
    width = {"x": dtype.itemsize, "g": dtype.itemsize, "m": 4, "v": 4, "d": 4}
    reduced, read, written = algorithm.traffic
    n = sum(sizes)
    moved = column_bytes(gpu.launches)
    for column in "xgmvd":
        wanted = n * width[column]
        assert moved["apply"][f"read {column}"] == wanted * (column in read)
        assert moved["apply"][f"written {column}"] == wanted * (column in written)
        if reduced:
            assert moved["reduce"][f"read {column}"] == wanted * (column in reduced)
            assert moved["reduce"][f"written {column}"] == 0
    assert element_bytes(gpu.launches) == n * bytes_per_parameter(algorithm, dtype)
    check_sectors(gpu.launches)


# Options, the parameters' type, and the bytes of a parameter in NGN-MDv1: the design's, with scales.
SCALES = 4 / 64
NARROW = {
    "bfloat16": ({"state": "bfloat16"}, torch.float32, 26),
    "8bit, bfloat16": ({"state": ("8bit", "bfloat16")}, torch.float32, 24 + 2 * SCALES),
    "8bit": ({"state": "8bit"}, torch.float32, 21 + 5 * SCALES),
    "bfloat16, 8bit": ({"state": "8bit"}, torch.bfloat16, 13 + 5 * SCALES),
    "exact": ({"state": "8bit", "rounding": "exact"}, torch.bfloat16, 17 + 5 * SCALES),
}
EVERY_NARROW = pytest.mark.parametrize(("options", "dtype", "size"), NARROW.values(), ids=NARROW)


@EVERY_NARROW
def test_bytes_of_narrow_numbers(
    options: dict[str, Any], dtype: torch.dtype, size: float, gpu: Any
) -> None:
    """No byte more than the design's, in whole sectors, and with the results of the oracle."""
    sizes = (8192, 4096)
    run(steps(gpu, NGNMDv1, random_columns([[(n,)] for n in sizes], dtype), count=1, **options))
    assert element_bytes(gpu.launches) == size * sum(sizes)
    check_sectors(gpu.launches)


@pytest.mark.parametrize(
    ("algorithm", "gpu"),
    [
        (NGNM, "triton-90"),
        (NGNMDv1W, "triton-80"),
        (NGNMDv1W, "triton-90"),
        (NGNMDv2, "triton-100"),
        *((algorithm, "cuda") for algorithm in (NGNM, NGNMDv1W, NGNMDv2)),
    ],
    indirect=["gpu"],
    ids=str,
)
def test_narrow_state(algorithm: Algorithm, gpu: Any) -> None:
    """Tails below a block, more than one chunk, a view at an odd address, and small parameters."""
    columns = random_columns([[(4161,), (10,)], []])
    columns[1].append(Parameter(misaligned(0.1 * torch.randn(4100), 1)))
    run(steps(gpu, algorithm, columns, state="8bit", max_grad_norm=1.0))


@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
def test_rounded_parameters_and_narrow_state(rounding: str, gpu: Any) -> None:
    """The bits of the reference, up to what the arithmetic makes of them."""
    options: dict[str, Any] = {"state": ("8bit", "bfloat16"), "rounding": rounding}
    found = []
    for backend in (gpu.name, "reference"):
        columns = random_columns([[(4161,)], [(4200,)]], torch.bfloat16)
        optimizer = NGNMDv2.build(columns, backend=backend, **options)
        train(optimizer, 0, 1)
        found.append(optimizer)
    differ, total = 0, 0
    for p, q in zip(*map(params_of, found), strict=True):
        a, b = found[0].state[p], found[1].state[q]
        assert set(a) == set(b)
        for key in set(a) - {"remainder"}:
            assert a[key].dtype == b[key].dtype
            differ += int((a[key] != b[key]).sum())
            total += a[key].numel()
        differ += int((p != q).sum())
        total += p.numel()
        if rounding == "exact":
            near, far = (
                formats.join_bfloat16(x.detach(), s["remainder"]) for x, s in ((p, a), (q, b))
            )
            differ += int(((near - far).abs() > 3e-8).sum())
    assert differ <= total // 500


def test_kept_elements_and_skipped_steps_of_narrow_state(gpu: Any) -> None:
    columns = random_columns([[(4161,)], []])
    optimizer = NGNMDv2.build(columns, backend=gpu.name, state="8bit")
    train(optimizer, 0)
    with unchanged(optimizer, new_state=False), pytest.warns(ngn_warning()):
        optimizer.step(loss=float("nan"))
    p = columns[0][0]
    x = p.detach().clone()
    random_gradients(params_of(optimizer), seed=1)
    p.grad[70] = float("nan")  # type: ignore[index]
    with pytest.warns(ngn_warning(), match="kept"):
        optimizer.step(loss=1.0)
    moved = p.detach() != x
    assert not moved[70] and int(moved.sum()) == p.numel() - 1
    assert all(t.float().isfinite().all() for t in optimizer.state[p].values())


@EVERY_BUCKET
def test_bytes_of_clipping(algorithm: Algorithm, gpu: Any) -> None:
    """One word more where the norm must come first, none where the reduce gives it anyway."""
    n = 4096
    columns = random_columns([[(n // 2,)], [(n // 2,)]])
    run(steps(gpu, algorithm, columns, count=1, max_grad_norm=0.1))
    extra = algorithm.coordinate or algorithm.rms
    words = sum(map(len, algorithm.traffic)) + extra
    assert element_bytes(gpu.launches) == 4 * n * words
    assert len(gpu.launches) == (1 if algorithm.coordinate else 2) + extra


def misaligned(values: Tensor, elements: int) -> Tensor:
    """The same values at an address that many elements past an aligned one."""
    buffer = torch.full((values.numel() + 64,), float("nan"), dtype=values.dtype)
    offset = elements + (-buffer.data_ptr() // values.element_size()) % (
        16 // values.element_size()
    )
    view = buffer[offset : offset + values.numel()]
    return view.copy_(values)


@EVERY
@pytest.mark.parametrize("column", ["x", "g", "state"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_unaligned_views(algorithm: Algorithm, column: str, dtype: torch.dtype, gpu: Any) -> None:
    """One column at an odd address: no fault, the same bytes, and still whole sectors of it."""
    n = 2051
    values = 0.1 * torch.randn(n)
    p = Parameter(misaligned(values.to(dtype), 1 if column == "x" else 0))
    optimizer = algorithm.simple([p], backend=gpu.name)
    pair = Pair(algorithm, optimizer)
    for _ in range(2):
        p.grad = misaligned(torch.randn(n).to(dtype) / n**0.5, 3 if column == "g" else 0)
        for key in {"momentum_buffer", "exp_avg_sq"} & set(optimizer.state[p]):
            if column == "state":
                optimizer.state[p][key] = misaligned(optimizer.state[p][key], 2)
        pair.sync()
        gpu.launches.clear()
        pair.step(1.0)
        pair.check_step()
    assert element_bytes(gpu.launches) == n * bytes_per_parameter(algorithm, dtype)
    apply = gpu.launches[-1].traffic
    # A warp reads 32 neighbours at once, whatever the first address: at most one sector too many.
    assert 32 * apply.written_sectors["x0"] <= 2 * n * dtype.itemsize


@EVERY
@pytest.mark.parametrize("state", ["float32", "8bit"])
def test_any_order_of_blocks_gives_the_same_bits(
    algorithm: Algorithm, state: str, gpu: Any
) -> None:
    if state == "8bit" and algorithm is not NGNMDv1:
        pytest.skip("one rule stands for the others")

    def result(order: str, seed: int) -> Any:
        gpu.order, gpu.seed = order, seed
        optimizer = algorithm.build(
            random_columns([[(2100,), (5,)], [(4096,)]]),
            backend=gpu.name,
            max_grad_norm=1.0,
            state=state,
        )
        for k in range(2):
            random_gradients(params_of(optimizer), seed=k)
            optimizer.step(loss=0.5)
        plan = optimizer._plan
        return snapshot(optimizer), bits(plan.sums[0]), bits(plan.home.report.sizes)

    expected = result("sequential", 0)
    for order, seed in ORDERS:
        assert result(order, seed) == expected, f"{order} {seed}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@EVERY
def test_a_bad_gradient(algorithm: Algorithm, bad: float, gpu: Any) -> None:
    """Scalar rules skip the whole step; coordinate rules keep that element and count the step."""
    columns = random_columns([[(2100,)], [(5,)]])
    optimizer = algorithm.build(columns, backend=gpu.name)
    train(optimizer, 0)
    before = snapshot(optimizer)
    random_gradients(params_of(optimizer), seed=1)
    columns[0][0].grad[2099] = bad  # type: ignore[index]
    gpu.launches.clear()
    with pytest.warns(ngn_warning()):
        optimizer.step(loss=1.0)
    assert int(optimizer.skipped_steps) == 1
    count = optimizer.state[columns[0][0]]["step"]
    if algorithm.coordinate:
        assert int(count) == 2
        assert bits(columns[0][0][2099:]) == before[0][0][-4:]
        assert bits(columns[0][0][:2099]) != before[0][0][:-4]
    else:
        assert int(count) == 1
        assert snapshot(optimizer) == before
        moved = column_bytes(gpu.launches)["apply"]
        assert not any(moved[f"{kind} {c}"] for kind in ("read", "written") for c in "xgmv")


def ngn_warning() -> type[Warning]:
    from ngn_kernels import SkippedStepWarning

    return SkippedStepWarning


@pytest.mark.parametrize(
    ("index", "value", "reason"),
    [
        (Input.FOUND_INF, 1.0, "overflow"),
        (Input.LOSS, -0.5, "below loss_floor"),
        (Input.LOSS, float("nan"), "loss is not finite"),
        (Input.LOSS, float("-inf"), "loss is not finite"),
    ],
)
@EVERY
def test_what_only_the_device_can_see(
    algorithm: Algorithm,
    index: int,
    value: float,
    reason: str,
    gpu: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number that came from a tensor on the device: every gradient is finite, yet nothing moves."""
    columns = random_columns([[(2100,)], [(5,)]])
    optimizer = algorithm.build(columns, backend=gpu.name)
    train(optimizer, 0)
    before = snapshot(optimizer)
    with monkeypatch.context() as patch, pytest.warns(ngn_warning(), match=reason):
        scalars = optimizer._plan.home.inputs.scalars
        sent = scalars.clone()
        patch.setattr(Inputs, "send", lambda inputs: inputs.scalars[index].fill_(value))
        optimizer.step(loss=1.0)
        scalars.copy_(sent)  # which here are the host's own
    assert snapshot(optimizer) == before
    assert int(optimizer.skipped_steps) == 1
    Pair(algorithm, optimizer).checked_step(1.0)


def test_overflow_of_the_storage_type(gpu: Any) -> None:
    """6e4 + 1e4 does not fit float16: that element keeps its values, its neighbours move."""
    p = Parameter(torch.tensor([6e4, 1.0, -6e4], dtype=torch.float16))
    optimizer = ALGORITHMS[0].simple([p], lr=1e4, backend=gpu.name)
    p.grad = torch.tensor([-1.0, -1.0, 0.0], dtype=torch.float16)
    with pytest.warns(ngn_warning()):
        optimizer.step(loss=1e12)
    assert p.tolist()[0] == 6e4 and p.tolist()[2] == -6e4
    assert p.tolist()[1] == pytest.approx(1e4, rel=1e-3)


@on("triton-90")
def test_a_second_step_compiles_nothing(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """New values, options, gradients and losses reach the kernel that is already there."""
    optimizer = NGNMDv1.build(random_columns(SHAPES), backend=gpu.name)
    train(optimizer, 0)
    kernels = backends._load("triton").kernels  # type: ignore[union-attr]
    for kernel in (kernels.reduce, kernels.apply):
        monkeypatch.setattr(kernel, "run", lambda *a, **k: pytest.fail("bound and looked up again"))
    optimizer.param_groups[0] |= {"lr": 0.123, "step_cap": 0.4, "weight_decay": 0.02}
    optimizer.loss_target, optimizer.loss_floor = 0.7, -0.5
    random_gradients(params_of(optimizer), seed=1)
    Pair(NGNMDv1, optimizer, loss_target=0.7, loss_floor=-0.5).checked_step(7.0)
