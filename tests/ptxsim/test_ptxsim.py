"""The simulator itself: what it computes, what it counts, and what it refuses."""

from __future__ import annotations

import math
import os
import struct

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("these tests compile, the interpreter does not", allow_module_level=True)
triton = pytest.importorskip("triton")

import triton.language as tl

from ptxsim import (
    DataRace,
    DivergentBarrier,
    Kernel,
    Memory,
    MemoryFault,
    MisalignedAccess,
    launch,
)
from ptxsim.driver import SimulatedGPU
from ptxsim.ptx import Unsupported, literal, modules

ARCHITECTURES = (80, 90, 100)


@triton.jit
def scaled_sum(x, y, total, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o < n
    b = tl.load(x + o, mask=mask, other=0.0)
    tl.store(y + o, tl.div_rn(b, tl.sqrt_rn(b * b + 1.0)), mask=mask)
    tl.atomic_add(total, tl.max(o))


@triton.jit
def lost_update(total):
    tl.store(total, tl.load(total) + 1)


@triton.jit
def wide_scalars(x, y):
    tl.store(y, tl.exp(tl.load(x)))
    tl.store(y + 1, tl.log(tl.load(x + 1)))
    tl.store(y + 2, tl.load(x + 2) / tl.load(x + 3))
    tl.store(y + 3, tl.sqrt(tl.load(x + 3)))


@pytest.fixture(params=ARCHITECTURES)
def gpu(request):
    with SimulatedGPU(request.param).active() as simulated:
        yield simulated


@pytest.mark.parametrize("n", [1, 255, 1024, 4099])
@pytest.mark.parametrize("order", ["sequential", "reversed", "random", "interleaved"])
def test_a_kernel_computes_what_numpy_does(gpu, n, order):
    x, y, total = torch.randn(n), torch.full((n,), math.nan), torch.zeros(1, dtype=torch.int32)
    for name, tensor in {"x": x, "y": y, "total": total}.items():
        gpu.memory.register(tensor, name, read_only=name == "x")
    gpu.order = order
    scaled_sum[(triton.cdiv(n, 1024),)](x, y, total, n, BLOCK=1024, enable_fp_fusion=False)
    # torch's vectorised square root is not always rounded correctly.
    wanted = x.numpy() / np.sqrt(x.numpy() * x.numpy() + np.float32(1))
    np.testing.assert_array_equal(y.numpy(), wanted)
    assert int(total) == sum(range(1023, 1024 * triton.cdiv(n, 1024), 1024))
    traffic = gpu.launches[-1].traffic
    assert (traffic.read["x"], traffic.written["y"]) == (4 * n, 4 * n)
    assert traffic.written["x"] == 0


def test_interleaving_shows_a_lost_update(gpu):
    gpu.check_races = False
    totals = set()
    for seed in range(8):
        total = torch.zeros(1)
        gpu.memory, gpu.order, gpu.seed = Memory(), "interleaved", seed
        gpu.memory.register(total, "total")
        lost_update[(6,)](total, enable_fp_fusion=False)
        totals.add(float(total))
    assert min(totals) < 6


def test_a_lost_update_is_a_race_in_any_order(gpu):
    total = torch.zeros(1)
    gpu.memory.register(total, "total")
    with pytest.raises(DataRace) as race:
        lost_update[(6,)](total, enable_fp_fusion=False)
    line = lost_update.fn.__code__.co_firstlineno + 2
    assert str(race.value).count(f"(test_ptxsim.py:{line})") == 2 * 3
    assert "0 bytes from the start of total" in str(race.value)


def test_float64_functions_are_accurate(gpu):
    x = torch.tensor([-0.0123, 0.999, 1.0, 3.0], dtype=torch.float64)
    y = torch.empty(4, dtype=torch.float64)
    gpu.memory.register(x, "x")
    gpu.memory.register(y, "y")
    wide_scalars[(1,)](x, y, enable_fp_fusion=False)
    wanted = [math.exp(x[0]), math.log(x[1]), 1 / 3, math.sqrt(3)]
    np.testing.assert_allclose(y.numpy(), wanted, rtol=3e-16, atol=0)


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [(4098, MemoryFault, "of y"), (0, MemoryFault, "nothing is registered")],
)
def test_an_access_out_of_bounds_is_refused(gpu, keep, error, message):
    x, y, total = torch.randn(4099), torch.empty(4099), torch.zeros(1, dtype=torch.int32)
    if keep:
        gpu.memory.register(x, "x")
        gpu.memory.register(y[:keep], "y")
        gpu.memory.register(total, "total")
    with pytest.raises(error, match=message):
        scaled_sum[(5,)](x, y, total, 4099, BLOCK=1024, enable_fp_fusion=False)


def test_a_write_to_read_only_memory_is_refused(gpu):
    x, y, total = torch.randn(1024), torch.empty(1024), torch.zeros(1, dtype=torch.int32)
    gpu.memory.register(x, "x")
    gpu.memory.register(total, "total")
    gpu.memory.register(y, "y", read_only=True)
    with pytest.raises(MemoryFault, match="y, which is read-only"):
        scaled_sum[(1,)](x, y, total, 1024, BLOCK=1024, enable_fp_fusion=False)


HEADER = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p) .reqntid 32
{
.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<4>;
ld.param.b64 %rd1, [p];
"""


def run(body, words=8):
    data = torch.arange(words, dtype=torch.int32)
    memory = Memory()
    memory.register(data, "data")
    # All threads store the same words: that is a race, and not what these tests are about.
    launch(Kernel(HEADER + body + "\nret;\n}"), 1, 32, [data], memory, check_races=False)
    return data


def test_an_unaligned_vector_is_refused():
    with pytest.raises(MisalignedAccess, match="16 bytes"):
        run("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+4];")


def test_registers_start_as_poison():
    assert int(run("st.global.b32 [%rd1], %r5;")[0]) == -1


@pytest.mark.parametrize(
    "body",
    [
        "frobnicate.b32 %r1, %r2;",
        "add.rz.f32 %r1, %r2, %r3;",
        "add.weird.s32 %r1, %r2, %r3;",
        "atom.global.gpu.relaxed.add.f32 %r1, [%rd1], %r2;",
        "mov.u32 %r1, %clock;",
        "bar.warp.sync -1;",
        "bar.sync 1, 32;",
        "ld.acquire.global.b32 %r1, [%rd1];",
        "ld.gpu.global.b32 %r1, [%rd1];",
        "st.acquire.gpu.global.b32 [%rd1], %r1;",
        "ld.relaxed.cluster.global.b32 %r1, [%rd1];",
        "fence.acq_rel;",
        "fence.proxy.async;",
    ],
)
def test_what_is_not_known_is_refused(body):
    with pytest.raises(Unsupported):
        run(body)


# A few threads take a branch, and go on with the others after it; the branch may stand behind that place.
PARTING = {
    "before": "@!%p1 bra JOIN;\nmov.u32 %r2, 5;\nJOIN:\n{after}\nret;",
    "behind": "@%p1 bra FAR;\nJOIN:\n{after}\nret;\nFAR:\nmov.u32 %r2, 5;\nbra JOIN;",
}


@pytest.mark.parametrize("form", PARTING)
@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        ("add.s32 %r3, %r1, %r2;", [t + (5 if t < 7 else 1) for t in range(32)]),
        ("shfl.sync.bfly.b32 %r3, %r2, 4, 31, -1;", [5 if t ^ 4 < 7 else 1 for t in range(32)]),
        ("bar.sync 0; mov.u32 %r3, %r2;", [5 if t < 7 else 1 for t in range(32)]),
        ("bar.red.or.pred %p2, 0, %p1; selp.u32 %r3, 1, 0, %p2;", [1] * 32),
    ],
    ids=["sum", "shuffle", "barrier", "or"],
)
def test_threads_that_part_ways_meet_again(form, after, wanted):
    body = "mov.u32 %r1, %tid.x; mov.u32 %r2, 1; setp.lt.u32 %p1, %r1, 7;"
    body += "mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;\n"
    after += " st.global.b32 [%rd3], %r3;"
    assert run(body + PARTING[form].format(after=after), 32).tolist() == wanted


def test_a_loop_ends_for_one_thread_after_the_other():
    body = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, 0; mov.u32 %r3, 0;
    AGAIN: add.s32 %r3, %r3, %r2; add.s32 %r2, %r2, 1; setp.le.s32 %p1, %r2, %r1; @%p1 bra AGAIN;
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2; st.global.b32 [%rd3], %r3;
    """
    assert run(body, 32).tolist() == [t * (t + 1) // 2 for t in range(32)]


def test_a_barrier_that_some_threads_never_come_to_is_an_error():
    body = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7; @%p1 bra DONE;\nbar.sync 0;\nDONE:"
    with pytest.raises(DivergentBarrier, match="25 of 32"):
        run(body)


def test_a_register_of_a_scope_is_not_the_one_outside():
    body = """
    mov.u32 %r1, 7;
    { .reg .b32 %r1; mov.u32 %r1, 9; st.global.b32 [%rd1], %r1; }
    st.global.b32 [%rd1+4], %r1;
    """
    assert run(body)[:2].tolist() == [9, 7]


def test_what_nvcc_emits_and_triton_does_not():
    body = """
    mov.b32 %r1, 0x00012345; clz.b32 %r2, %r1; st.global.b32 [%rd1], %r2;
    rem.u32 %r3, %r1, 1000; st.global.b32 [%rd1+4], %r3;
    mov.b32 %r4, 40; shl.b32 %r5, %r1, %r4; st.global.b32 [%rd1+8], %r5;
    mov.b32 %r6, -5; shr.s32 %r7, %r6, %r4; st.global.b32 [%rd1+12], %r7;
    cvta.to.global.u64 %rd2, %rd1; mov.b32 %r2, 0; clz.b32 %r3, %r2; st.global.b32 [%rd2+16], %r3;
    shfl.sync.idx.b32 %r5|%p1, %r1, 3, 0x1c1f, -1; selp.b32 %r6, 1, 0, %p1; st.global.b32 [%rd1+20], %r6;
    """
    assert run(body)[:6].tolist() == [15, 0x12345 % 1000, 0, -1, 32, 1]
    with pytest.raises(RuntimeError, match="trap"):
        run("trap;")


def test_a_struct_is_a_parameter():
    ptx = """
    .version 9.0
    .visible .entry k(.param .align 8 .b8 p[24]) .maxntid 32, 1, 1
    {
    .reg .b32 %r<4>; .reg .b64 %rd<4>; .shared .align 8 .b8 first[12]; .shared .align 4 .u8 second;
    mov.b64 %rd2, p; ld.param.u64 %rd1, [%rd2+8];
    ld.param.v2.u32 {%r1, %r2}, [p+16]; st.global.v2.b32 [%rd1], {%r1, %r2};
    mov.u32 %r3, second; st.global.b32 [%rd1+8], %r3;
    ret;
    }
    """
    data = torch.zeros(4, dtype=torch.int32)
    memory = Memory()
    memory.register(data, "data")
    argument = struct.pack("<qqii", 0, data.data_ptr(), 3, -4)
    kernel = Kernel(ptx)
    launch(kernel, 1, 32, [argument], memory, check_races=False)
    assert data[:2].tolist() == [3, -4] and int(data[2]) % 4 == 0
    assert kernel.shared_bytes == 13
    with pytest.raises(ValueError, match="24 bytes is given 8"):
        launch(kernel, 1, 32, [bytes(8)], memory)


def test_a_module_of_several_kernels_comes_apart():
    ptx = ".version 9.0\n" + "\n".join(
        f".shared .b8 own{n}[8];\n.visible .entry k{n}()\n{{\nst.shared.b32 [own{n}], 0;\nret;\n}}"
        for n in range(2)
    )
    kernels = {name: Kernel(part) for name, part in modules(ptx).items()}
    assert [(name, list(k.shared), k.shared_bytes) for name, k in kernels.items()] == [
        ("k0", ["own0"], 8),
        ("k1", ["own1"], 8),
    ]


def test_an_endless_loop_ends(monkeypatch):
    monkeypatch.setattr("ptxsim.simulator.MOST_STEPS", 1000)
    with pytest.raises(RuntimeError, match="not come to an end"):
        run("AGAIN:\nbra AGAIN;")


def test_integers():
    body = """
    mov.b32 %r1, -7; mov.b32 %r2, 3;
    mul.wide.s32 %rd2, %r1, %r2; st.global.b64 [%rd1], %rd2;
    shr.s32 %r3, %r1, 1; st.global.b32 [%rd1+8], %r3;
    shr.u32 %r4, %r1, 28; st.global.b32 [%rd1+12], %r4;
    prmt.b32 %r5, 0x44332211, 0x88776655, 0x0572; st.global.b32 [%rd1+16], %r5;
    bfe.u32 %r6, 0x12345678, 8, 12; st.global.b32 [%rd1+20], %r6;
    max.s32 %r7, %r1, %r2; st.global.b32 [%rd1+24], %r7;
    """
    found = run(body)
    assert int(found[:2].view(torch.int64)) == -21
    assert [int(value) for value in found[2:7]] == [-4, 15, 0x11668833, 0x456, 3]


def test_signs():
    """A byte's sign is repeated by prmt, and by cvt in all the bits of a wider register."""
    body = """
    .reg .b16 %rs<2>;
    prmt.b32 %r1, 0x00008001, 0, 0x9991; st.global.b32 [%rd1], %r1;
    prmt.b32 %r1, 0x00008001, 0, 0x8880; st.global.b32 [%rd1+4], %r1;
    mov.b32 %r2, 0x1fb; cvt.s8.s32 %rs1, %r2; cvt.rn.f32.s16 %r3, %rs1; st.global.b32 [%rd1+8], %r3;
    neg.s32 %r4, 5; st.global.b32 [%rd1+12], %r4;
    """
    found = run(body)
    assert [int(value) for value in found[:2]] == [-128, 1]
    assert float(found[2:3].view(torch.float32)) == -5.0
    assert int(found[3]) == -5


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(2.9, 2), (-2.9, -2), (3e9, 2**31 - 1), (-math.inf, -(2**31)), (math.nan, 0)],
)
def test_floats_are_cut_off_to_integers(value, wanted):
    bits = int(np.float32(value).view(np.uint32))
    body = f"mov.b32 %r1, 0f{bits:08X}; cvt.rzi.s32.f32 %r2, %r1; st.global.b32 [%rd1], %r2;"
    assert int(run(body)[0]) == wanted
    with pytest.raises(Unsupported):
        run(body.replace("rzi", "rni"))


def test_literals():
    assert literal("0f3F800000", 4) == 0x3F800000
    assert literal("0f3F800000", 8) == 0x3FF0000000000000
    assert literal("-1", 4) == 0xFFFFFFFF
    assert literal("%r1", 4) is None
