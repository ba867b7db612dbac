"""What only the C++ engine can get wrong: threads, instruction sets, addresses, its own checks."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from algorithms import EVERY, Algorithm
from helpers import OWN_GRADIENT_TYPES
from torch import Tensor

import ngn_kernels
from ngn_kernels.backends import availability
from ngn_kernels.layout import Column, DType, Flag, GroupColumn, Input, Rounding, Size
from ngn_kernels.planning.rows import Bucket, BucketKey, Participant, Row
from ngn_kernels.planning.state import init_state
from ngn_kernels.rules import NORM, RULES, Rule

pytestmark = pytest.mark.skipif(
    availability()["cpu"] is not None, reason="the C++ extension is not built"
)
if availability()["cpu"] is None:
    from ngn_kernels import _cpu

CSRC = Path(__file__).parent.parent / "csrc"
SIZES = (1, 15, 16, 17, 511, 512, 513, 16383, 16384, 16385, 70_001, 0)


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    threads, isa = torch.get_num_threads(), _cpu.isa()
    yield
    torch.set_num_threads(threads)
    _cpu.use_isa(isa)


def three_steps(algorithm: Algorithm, dtype: torch.dtype) -> list[Tensor]:
    """Parameters and state after three steps with decay and clipping."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=generator).to(dtype).requires_grad_() for n in SIZES]
    opt = algorithm.simple(params, weight_decay=0.1, max_grad_norm=5.0, backend="cpu")
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        opt.step(loss=0.7)
    state = [t for p in params for t in opt.state[p].values()]
    return [p.detach() for p in params] + state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@EVERY
def test_same_bits_for_any_number_of_threads(algorithm: Algorithm, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    alone = three_steps(algorithm, dtype)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert all(
            torch.equal(a, b) for a, b in zip(alone, three_steps(algorithm, dtype), strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["NGN", "NGNMDv1", "NGNMDv2"])
def test_many_chunks_on_more_threads_than_cores(name: str, dtype: torch.dtype) -> None:
    """Who takes which of 62 chunks differs from run to run; no bit does."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(1_000_003, generator=generator).to(dtype) for _ in range(2))
    results = []
    for threads in (1, 2, 5, 8):
        torch.set_num_threads(threads)
        param = x.clone().requires_grad_()
        opt = getattr(ngn_kernels, name)([param], max_grad_norm=1.0, backend="cpu")
        for _ in range(2):
            param.grad = g
            opt.step(loss=0.7)
        results.append([param.detach(), *opt.state[param].values()])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_instruction_sets_are_those_of_the_processor() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        pytest.skip("nobody else says what this processor has")
    flags = set(cpuinfo.read_text().partition("flags")[2].partition("\n")[0].split())
    needed = {
        "avx512": {"avx512f", "avx512vl", "avx512bw", "avx512dq", "avx2", "fma"},
        "avx2": {"avx2", "fma"},
        "baseline": set(),
    }
    assert _cpu.isas() == [isa for isa, features in needed.items() if features <= flags]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@EVERY
def test_every_instruction_set_computes_the_same(algorithm: Algorithm, dtype: torch.dtype) -> None:
    """Up to rounding: some fuse multiplications with additions, and estimate roots."""
    assert _cpu.isas()[-1] == "baseline"
    results = []
    for isa in _cpu.isas():
        _cpu.use_isa(isa)
        assert _cpu.isa() == isa
        results.append(three_steps(algorithm, dtype))
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            eps = torch.finfo(dtype).eps  # a parameter that rounds otherwise decays otherwise
            torch.testing.assert_close(ours, theirs, rtol=32 * eps, atol=4 * eps)


@pytest.mark.parametrize("name", ("NGNMDv1", "NGNMDv2", "NGNM"))
def test_the_tail_computes_as_the_vectors_do(name: str) -> None:
    """An element's bits do not depend on whether it lies in a full vector."""
    for isa in _cpu.isas():
        _cpu.use_isa(isa)
        generator = torch.Generator().manual_seed(0)
        values, grads = (torch.randn(16, generator=generator).repeat(26)[:415] for _ in range(2))
        param = values.clone().requires_grad_()
        opt = getattr(ngn_kernels, name)([param], weight_decay=0.1, backend="cpu")
        for _ in range(3):
            param.grad = grads.clone()
            opt.step(loss=0.7)
        for tensor in (param.detach(), opt.state[param]["momentum_buffer"]):
            assert torch.equal(tensor, tensor[:16].repeat(26)[:415])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ("NGNM", "NGNMDv1", "NGNMDv2"))
def test_elements_that_would_overflow_stand_still_wherever_they_lie(
    name: str, dtype: torch.dtype
) -> None:
    """In the first and last vectors, between them and in the tail: x, m and v, and no others."""
    largest = torch.finfo(dtype).max
    grads = torch.linspace(-1, 1, 415, dtype=dtype)

    def two_steps(places: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        param = torch.zeros(415, dtype=dtype, requires_grad=True)
        opt = getattr(ngn_kernels, name)([param], backend="cpu")
        param.grad = grads
        opt.step(loss=0.7)
        param.data[places] = 0.9 * largest
        opt.state[param]["momentum_buffer"][places] = -0.5 * largest
        tensors = [param.detach(), *list(opt.state[param].values())[1:]]
        before = [tensor.clone() for tensor in tensors]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ngn_kernels.SkippedStepWarning)
            opt.step(loss=0.7)
        assert int(opt.skipped_steps) == bool(places)
        return before, tensors

    for isa in _cpu.isas():
        _cpu.use_isa(isa)
        _, undisturbed = two_steps([])
        for first in range(8):
            places = list(range(first, 415, 8))
            others = [i for i in range(415) if i not in places]
            for old, new, usual in zip(*two_steps(places), undisturbed, strict=True):
                assert torch.equal(new[places], old[places])
                assert torch.equal(new[others], usual[others])


@pytest.mark.parametrize("name", ("NGNMDv1", "NGNMDv2"))
@pytest.mark.parametrize("size", (1e-30, 1e-22, 1e-18, 1e-9, 1e9, 1e18))
def test_roots_of_second_moments_of_any_size(name: str, size: float) -> None:
    """From a second moment that underflows, and one that is 0, to one near the largest number."""
    grads = size * torch.linspace(-1, 1, 101, dtype=torch.float64)
    ours = torch.zeros(101, requires_grad=True)
    truth = torch.zeros(101, dtype=torch.float64, requires_grad=True)
    for isa in _cpu.isas():
        _cpu.use_isa(isa)
        for param, backend in ((ours, "cpu"), (truth, "reference")):
            opt = getattr(ngn_kernels, name)([param], lr=1e-3, backend=backend)
            param.data.zero_()
            param.grad = grads.to(param.dtype)
            opt.step(loss=0.7)
            assert int(opt.skipped_steps) == 0, backend
            assert float(opt.state[param]["step"]) == 1
        torch.testing.assert_close(ours.detach().double(), truth.detach(), rtol=2e-6, atol=1e-36)


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="does not run here"):
        _cpu.use_isa("mmx")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_addresses_that_are_not_aligned_to_an_element(dtype: torch.dtype) -> None:
    """A parameter over a byte buffer at an odd offset, as some checkpoint readers make them."""
    n, size = 1003, dtype.itemsize
    values, grads = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    raw = torch.empty(n * size + 1, dtype=torch.uint8)
    raw[1:] = values.view(torch.uint8)
    odd = torch.frombuffer(raw.numpy(), dtype=dtype, count=n, offset=1)
    assert odd.data_ptr() % size == 1
    results = []
    for param in (odd.requires_grad_(), values.clone().requires_grad_()):
        opt = ngn_kernels.NGNMDv1([param], backend="cpu")
        param.grad = grads.clone()
        opt.step(loss=1.0)
        results.append(param.detach().clone())
    assert torch.equal(*results)


def test_half_precision_conversions_are_exact() -> None:
    """Every finite float16 and bfloat16 survives a step that does not move it."""
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        param = every[every.isfinite()].clone().requires_grad_()
        before = param.detach().clone()
        param.grad = torch.zeros_like(param)
        ngn_kernels.NGN([param], backend="cpu").step(loss=1.0)
        assert torch.equal(param.detach().view(torch.int16), before.view(torch.int16))


@OWN_GRADIENT_TYPES
def test_narrowing_rounds_like_torch() -> None:
    """x - c g, with h so large that rho is 1: one rounding from float32, to nearest even."""
    for dtype in (torch.float16, torch.bfloat16):
        generator = torch.Generator().manual_seed(1)
        exponents = torch.randint(-26, 10, (50_000,), generator=generator)
        x = torch.ldexp(torch.randn(50_000, generator=generator), exponents).to(dtype)
        g = torch.randn(50_000, generator=generator) * x.float().abs()
        param = x.clone().requires_grad_()
        param.grad_dtype = torch.float32
        param.grad = g
        ngn_kernels.NGN([param], lr=1.0, backend="cpu").step(loss=1e30)
        assert torch.equal(param.detach(), (x.float() - g).to(dtype))


def make_bucket(param: Tensor, grad: Tensor) -> tuple[Bucket, Row]:
    param.grad = grad
    rule = RULES["NGN"]
    state: dict[str, Tensor] = {}
    init_state(state, param, rule)
    key = BucketKey(param.device, param.dtype, grad.dtype, torch.float32, torch.float32)
    row = Row(Participant(param, 0, "parameter 0", 1, rule), state, key)
    bucket = Bucket(key, [row], None)
    bucket.table[Column.G] = [grad.data_ptr()]
    return bucket, row


def test_more_than_two_to_the_31_elements() -> None:
    """Only the last chunks are touched, so that the memory is reserved but never used."""
    n = 2**31 + 1000
    param = torch.empty(n, dtype=torch.bfloat16)
    grad = torch.empty(n, dtype=torch.bfloat16)
    bucket, row = make_bucket(param.requires_grad_(), grad)
    chunks = bucket.chunks(_cpu.CHUNK)
    assert len(chunks) == -(-n // _cpu.CHUNK)
    assert chunks[-1].tolist() == [0, (n - 1) // _cpu.CHUNK * _cpu.CHUNK]
    with torch.no_grad():
        param[-2000:] = 1.0
        grad[-2000:] = 0.5
    sums = np.zeros((1, 3))
    tables = _cpu.Bucket(
        table=bucket.table,
        chunks=np.ascontiguousarray(chunks[-1:]),
        groups=np.array([[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]),
        inputs=np.array([1e30, 0.0, 1.0, 0.0, np.inf, 1.0]),
        sums=sums,
        totals=sums,
        index=0,
        counts=np.zeros(3, dtype=np.int64),
        sizes=np.zeros(Size.STEP_SIZES + 1),
        x_type=DType.BFLOAT16,
        g_type=DType.BFLOAT16,
        m_type=DType.FLOAT32,
        v_type=DType.FLOAT32,
        rounding=Rounding.NEAREST,
    )
    tables.reduce(NORM.flags, 2)
    tables.apply(NORM.flags, 2, True)
    touched = n - int(chunks[-1, 1])
    assert (param.detach()[-touched:] == 0.5).all()
    assert (param.detach()[-2000:-touched] == 1.0).all()
    assert row.step.item() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": np.zeros((6, 1), dtype=np.int64)}, "table has the wrong shape"),
        ({"chunks": np.array([[1, 0]])}, "a row that does not exist"),
        ({"chunks": np.array([[0, 16384]])}, "outside its row"),
        ({"chunks": np.array([[0, 7]])}, "outside its row"),
        ({"chunks": np.array([[0, -16384]])}, "outside its row"),
        ({"groups": np.zeros((0, 6)), "sizes": np.zeros(2)}, "a group that does not exist"),
        ({"inputs": np.zeros(4)}, "inputs must hold 6"),
        ({"counts": np.zeros(2, dtype=np.int64)}, "counts must hold 3"),
        ({"sizes": np.zeros(4)}, "sizes must hold 2 numbers and one for each group"),
        ({"index": 1}, "not a row of sums"),
        ({"m_type": "float16"}, "m must be float32, float64, bfloat16 or int8"),
        ({"m_type": "uint8"}, "m must be"),
        ({"v_type": "float16"}, "v must be float32, float64, bfloat16 or uint8"),
        ({"v_type": "int8"}, "v must be"),
        ({"g_type": "uint8"}, "must be floating-point"),
        ({"rounding": Rounding.EXACT}, "exact rounding needs bfloat16"),
        ({"rounding": 3}, "no such rounding"),
        *(({f"{column}_type": 6}, "no such element type") for column in "xgmv"),
    ],
)
def test_the_bindings_check_their_tables(change: dict[str, object], message: str) -> None:
    bucket, _ = make_bucket(torch.ones(9).requires_grad_(), torch.ones(9))
    sums = np.zeros((1, 3))
    arguments: dict[str, object] = {
        "table": bucket.table,
        "chunks": bucket.chunks(_cpu.CHUNK),
        "groups": np.zeros((1, len(GroupColumn))),
        "inputs": np.zeros(len(Input)),
        "sums": sums,
        "totals": sums,
        "index": 0,
        "counts": np.zeros(3, dtype=np.int64),
        "sizes": np.zeros(Size.STEP_SIZES + 1),
        "x_type": DType.FLOAT32,
        "g_type": DType.FLOAT32,
        "m_type": DType.FLOAT32,
        "v_type": DType.FLOAT32,
        "rounding": Rounding.NEAREST,
    }
    change = {
        key: DType[value.upper()] if isinstance(value, str) else value
        for key, value in change.items()
    }
    with pytest.raises(ValueError, match=message):
        _cpu.Bucket(**{**arguments, **change})  # type: ignore[arg-type]


def test_the_bindings_check_for_missing_state() -> None:
    bucket, _ = make_bucket(torch.ones(9).requires_grad_(), torch.ones(9))
    sums = np.zeros((1, 3))
    tables = _cpu.Bucket(
        table=bucket.table,
        chunks=bucket.chunks(_cpu.CHUNK),
        groups=np.zeros((1, len(GroupColumn))),
        inputs=np.zeros(len(Input)),
        sums=sums,
        totals=sums,
        index=0,
        counts=np.zeros(3, dtype=np.int64),
        sizes=np.zeros(Size.STEP_SIZES + 1),
        x_type=DType.FLOAT32,
        g_type=DType.FLOAT32,
        m_type=DType.FLOAT32,
        v_type=DType.FLOAT32,
        rounding=Rounding.NEAREST,
    )
    with pytest.raises(ValueError, match="no momentum buffer"):
        tables.apply(Rule(momentum=True).flags, 1, True)
    with pytest.raises(ValueError, match="no second moment"):
        tables.reduce(Rule(rms=True).flags, 1)
    with pytest.raises(ValueError, match="nothing to reduce"):
        tables.reduce(Rule(coordinate=True).flags, 1)
    with pytest.raises(ValueError, match="no direction"):
        tables.apply(Rule(directed=True).flags, 1, True)
    with pytest.raises(ValueError, match="given directions have no rms"):
        tables.reduce(Rule(directed=True, rms=True).flags, 1)
    for flags in (-1, 1 << len(Flag)):
        with pytest.raises(ValueError, match="no such rule"):
            tables.apply(flags, 1, True)


NO_THREADS = """
import resource, sys
import torch, ngn_kernels
from ngn_kernels import _cpu
torch.set_num_threads(4)
ngn_kernels.backends._load("cpu")
_cpu.use_team_launcher(0)
param = torch.nn.Parameter(torch.ones(200_000))
param.grad = torch.ones_like(param)
optimizer = ngn_kernels.NGN([param], lr=1.0, backend="cpu")
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 3_000_000, size + 3_000_000))
optimizer.step(loss=1e30)
assert bool((param == 0).all())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_threads_that_cannot_start_are_done_without() -> None:
    """Without OpenMP each step starts threads, whose stacks may not fit any more."""
    result = subprocess.run([sys.executable, "-c", NO_THREADS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def include_folders(generated: Path) -> list[str]:
    """Compiler options, after writing the header that the build makes."""
    command = [sys.executable, str(CSRC / "generate_layout.py"), str(generated / "layout.h")]
    subprocess.run(command, check=True)
    return ["-I", str(CSRC), "-I", str(generated)]


FLAGS = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq"],
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86")
@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("nm")), reason="needs g++ and nm")
@pytest.mark.parametrize("isa", FLAGS)
def test_the_linker_cannot_mix_instruction_sets(isa: str, tmp_path: Path) -> None:
    """A function that several objects define is taken from any of them: each must be of one set."""
    out = tmp_path / "engine.o"
    command = ["g++", "-std=c++17", "-O1", "-fno-inline", f"-DNGN_ISA={isa}", *FLAGS[isa]]
    command += ["-c", str(CSRC / "cpu" / "engine.cpp"), "-o", str(out)]
    subprocess.run([*command, *include_folders(tmp_path)], check=True)
    symbols = subprocess.run(["nm", "-C", str(out)], capture_output=True, text=True, check=True)
    shared = [line[19:] for line in symbols.stdout.splitlines() if line[17:18] in "WVu"]
    assert any("ngn::" in name for name in shared), "nothing was looked at"
    ours = [name for name in shared if "ngn::" in name]
    assert [name for name in ours if f"ngn::{isa}::" not in name and "(anonymous" not in name] == []


THREADS = """
import torch, ngn_kernels
from ngn_kernels.backends.cpu import _team_launcher
param = torch.nn.Parameter(torch.ones(100_000))
param.grad = torch.ones_like(param)
torch.set_num_threads(2)
ngn_kernels.NGNM([param], backend="cpu").step(loss=1.0)
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
assert len(libraries) <= 1, libraries
assert bool(_team_launcher()) == bool(libraries)
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_threads_are_torchs_own() -> None:
    """A second OpenMP library in the process would mean two pools that fight each other."""
    result = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_rule_h_is_ready_for_a_device(tmp_path: Path) -> None:
    source = tmp_path / "device.cu"
    source.write_text(
        '#include "math/rule.h"\n'
        "__global__ void kernel(ngn::Element<float>* e, const float* g, ngn::Sums s,\n"
        "                       ngn::Coefficients<float> k, ngn::Inputs t, double* out) {\n"
        "  ngn::Element<float> old = e[threadIdx.x];\n"
        "  const auto draft = ngn::draft<true, true>(old.v, g[threadIdx.x], k);\n"
        "  ngn::update<true, ngn::Decay::in_displacement>(e[threadIdx.x], draft, g[threadIdx.x], k);\n"
        "  auto headroom = ngn::headroom_of<true, true, false>(e[threadIdx.x], k);\n"
        "  ngn::keep(old, headroom, e[threadIdx.x]);\n"
        "  float weighted = 0, alignment = 0;\n"
        "  ngn::contribute<true, true>(old.x, old.v, g[threadIdx.x], k, weighted, alignment);\n"
        "  *out = weighted + ngn::shrink(ngn::Rule{true, false, true, false}, s, t).rho;\n"
        "}\n"
    )
    command = ["nvcc", "-std=c++17", "-arch=sm_80", "-ptx", "-Werror", "all-warnings"]
    result = subprocess.run(
        [*command, *include_folders(tmp_path), str(source), "-o", str(tmp_path / "device.ptx")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "sqrt.rn.f32" in (tmp_path / "device.ptx").read_text()


def test_step_counts_of_neighbours_differ() -> None:
    """Rows of one group lie side by side, each with the bias correction of its own count."""
    results = []
    for backend in ("reference", "cpu"):
        params = [torch.nn.Parameter(torch.ones(40)) for _ in range(3)]
        optimizer = ngn_kernels.NGNMDv1(params, lr=0.1, backend=backend)
        for taking_part in (params[:1], params[:2], params):
            for p in params:
                p.grad = torch.linspace(1, 2, 40) if any(p is q for q in taking_part) else None
            optimizer.step(loss=1.0)
        results.append(torch.stack([p.detach() for p in params]))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
