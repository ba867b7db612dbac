"""The launcher of the CUDA engine against a driver that stands in: devices, streams, arguments, errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from algorithms import EVERY, Algorithm, NGNMDv1, NGNMDv2
from fake_gpu import FakeGPU
from gpu_engines import require, simulated
from helpers import params_of, random_columns, random_gradients, snapshot, warnings_of
from steps import train
from torch._subclasses.fake_tensor import FakeTensorMode

import ngn_kernels.backends as backends
from ngn_kernels import doctor
from ngn_kernels.extension import why_missing
from ngn_kernels.layout import DType, Flag, Rounding
from ngn_kernels.planning.rows import BucketKey
from ngn_kernels.rules import Rule

if why_missing("_cuda") is not None:
    pytest.skip(str(why_missing("_cuda")), allow_module_level=True)

from ngn_bench.gpu.stub_driver import StubDriver

from ngn_kernels import _cuda
from ngn_kernels.backends import cuda

OUT_OF_MEMORY, NO_IMAGE, DESTROYED, LAUNCH_FAILED = 2, 209, 709, 719


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with simulated("cuda", monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def driver() -> StubDriver:
    require("cuda")
    return StubDriver()


# Errors: CUDA's own name and words, and everything as it was


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        ("cuModuleLoadData", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"),
        (
            "cuModuleLoadData",
            NO_IMAGE,
            "CUDA_ERROR_NO_BINARY_FOR_GPU (no kernel image is available",
        ),
        ("cuModuleGetFunction", 500, "CUDA_ERROR_NOT_FOUND (named symbol not found)"),
        ("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuCtxPushCurrent", 201, "CUDA_ERROR_INVALID_CONTEXT"),
        ("cuDeviceGet", 4242, "failed: error 4242"),
    ],
)
def test_kernels_that_do_not_load_leave_everything_as_it_was(
    call: str, code: int, said: str, gpu: Any
) -> None:
    """The error names what the kernels are made for; once the reason has gone, the same step works."""
    optimizer = NGNMDv1.build(random_columns([[(5,)], [(3,)]]), backend="cuda")
    random_gradients(params_of(optimizer), seed=0)
    before = snapshot(optimizer)
    gpu.driver.fail(call, code)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step(loss=1.0)
    assert said in str(caught.value) and f"{call} failed" in str(caught.value)
    assert "sm_75, sm_80" in str(caught.value)
    assert snapshot(optimizer) == before and not gpu.launches
    assert gpu.driver.contexts == 0
    gpu.driver.fail("", 0)
    optimizer.step(loss=1.0)
    assert snapshot(optimizer) != before


@EVERY
@pytest.mark.parametrize("launch", [0, 1])
def test_a_launch_that_fails(algorithm: Algorithm, launch: int, gpu: Any) -> None:
    """The first or the second one of a step after others; a rule may have one only."""
    optimizer = algorithm.build(random_columns([[(5,)], [(3,)]]), backend="cuda")
    train(optimizer, 0)
    random_gradients(params_of(optimizer), seed=1)
    if algorithm.coordinate and launch:
        pytest.skip("it has one launch")
    before = snapshot(optimizer)
    gpu.driver.fail("cuLaunchKernel", LAUNCH_FAILED, after=launch)
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed: CUDA_ERROR_LAUNCH_FAILED"):
        optimizer.step(loss=1.0)
    assert snapshot(optimizer) == before
    assert gpu.driver.contexts == 0
    gpu.driver.fail("", 0)
    optimizer.step(loss=1.0)
    assert snapshot(optimizer) != before


def test_a_context_that_is_lost_in_the_middle_of_a_run(gpu: Any) -> None:
    """Every later step says so, and none changes anything."""
    optimizer = NGNMDv2.build(random_columns([[(5,)], [(3,)]]), backend="cuda")
    train(optimizer, 0, 1)
    before = snapshot(optimizer)
    for call in ("cuCtxGetCurrent", "cuLaunchKernel"):
        gpu.driver.fail(call, DESTROYED)
        for _ in range(2):
            random_gradients(params_of(optimizer), seed=2)
            with pytest.raises(RuntimeError, match="CUDA_ERROR_CONTEXT_IS_DESTROYED"):
                optimizer.step(loss=1.0)
        assert snapshot(optimizer) == before


def test_a_driver_that_does_not_start(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    from ngn_bench.gpu.stub_driver import library

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "LIBRARY", str(library()))
    assert cuda.load().name == "cuda"
    driver.fail("cuInit", 100)
    with pytest.raises(backends.Unavailable, match="cuInit failed: CUDA_ERROR_NO_DEVICE"):
        cuda.load()


@pytest.mark.skipif(sys.platform == "win32", reason="libraries have other names")
@pytest.mark.parametrize(
    ("library", "said"),
    [("libno.such.so", "no CUDA driver: libno.such.so"), ("libm.so.6", "it has no cuInit")],
)
def test_without_a_driver(library: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sees a GPU where the library is missing: a reason, not a crash."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "LIBRARY", library)
    with pytest.raises(backends.Unavailable, match=said):
        cuda.load()


def test_the_kernels_are_not_for_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3")
    with pytest.raises(backends.Unavailable, match="AMD"):
        cuda.load()
    assert backends.preferred_backends("cuda") == ("triton",)


# Devices and streams


class Noted:
    """Launches of fake CUDA tensors, as the driver sees them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int, int]] = []
        self.driver = StubDriver(on_launch=self.note)

    def note(
        self, device: int, name: bytes, blocks: int, threads: int, stream: int, at: int
    ) -> int:
        kind = name.decode().split("_")[1]
        self.seen.append((kind, device, self.driver.current, int(stream or 0)))
        return 0


def test_launches_go_to_the_current_stream_of_the_tensors_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever torch is at the moment, which finds its own context again afterwards."""
    with FakeGPU(monkeypatch, "cuda").active():
        noted = Noted()
        streams = {0: 0x70, 1: 0x91}
        backend = noted.driver.backend("cuda", streams.__getitem__)
        backends_load = backends._load
        monkeypatch.setattr(
            backends, "_load", lambda n: backend if n == "cuda" else backends_load(n)
        )
        params = [torch.nn.Parameter(torch.empty(7, device=f"cuda:{i}")) for i in range(2)]
        optimizer = NGNMDv1.simple(params, backend="cuda")
        for k in range(3):
            for p in params:
                p.grad = torch.empty_like(p)
            noted.seen.clear()
            if k:
                noted.driver.push(k - 1)
            before = noted.driver.contexts, noted.driver.current
            optimizer.step(loss=torch.ones((), device="cuda:0"))
            assert (noted.driver.contexts, noted.driver.current) == before
            assert sorted(noted.seen) == sorted(
                (kind, i, i, streams[i]) for kind in ("reduce", "apply") for i in range(2)
            )
            streams = {0: 0x70 + 16 * k, 1: 0x91 + 16 * k}
            backend.stream = streams.__getitem__
            for prepared in optimizer._plan._prepared:
                prepared._stream = streams.__getitem__


# What `auto` takes, and what it says


def single(device: str) -> BucketKey:
    dtypes = [torch.float32] * 4
    return BucketKey(torch.device(device), *dtypes)


def chosen(key: BucketKey) -> tuple[str, list[str]]:
    """Of three buckets alike, and what was said."""
    backends._say_once.cache_clear()
    names: list[str] = []
    said = warnings_of(
        lambda: names.extend(backends.select_backend("auto", key).name for _ in range(3))
    )
    assert len(set(names)) == 1
    return names[0], said


def test_auto_takes_the_cuda_engine_first(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = StubDriver().backend("cuda")
    monkeypatch.setattr(backends, "_load", lambda name: backend)
    assert backends.preferred_backends("cuda") == ("cuda", "triton")
    assert chosen(single("cuda:1")) == ("cuda", [])
    assert backends.default_backend("auto", torch.device("cuda:1")) == "cuda"


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[StubDriver], dict[str, Any]]:
    """The two GPU engines, the CUDA one of a given driver, whose kernels compute nothing."""
    pytest.importorskip("triton")
    from ngn_bench.gpu.stub_kernels import counting_backend

    def loaded(driver: StubDriver) -> dict[str, Any]:
        found = {"cuda": driver.backend("cuda"), "triton": counting_backend("cuda")[1]}
        load = backends._load
        monkeypatch.setattr(backends, "_load", lambda name: found.get(name) or load(name))
        return found

    return loaded


def refusing(*devices: int) -> StubDriver:
    """A driver that has no code for some devices."""
    return StubDriver(on_load=lambda device, image: NO_IMAGE if device in devices else 0)


def test_auto_takes_triton_where_a_device_takes_no_cuda_kernels(both: Any) -> None:
    loaded = both(refusing(0))
    name, said = chosen(single("cuda:0"))
    assert name == "triton"
    (text,) = said
    assert "no kernel image" in text and text.endswith("using the triton backend")
    assert chosen(single("cuda:1")) == ("cuda", [])

    loaded["triton"] = "Triton is missing"
    name, said = chosen(single("cuda:0"))
    assert name == "reference"
    (text,) = said
    assert "no kernel image" in text and "Triton is missing" in text
    assert text.endswith("using the reference backend, which is slower")


def test_auto_keeps_its_engine_when_the_reason_has_gone(both: Any, driver: StubDriver) -> None:
    """A run never changes it in the middle; who asks for one by name tries again."""
    both(driver)
    driver.fail("cuModuleLoadData", OUT_OF_MEMORY)
    key = single("cuda:0")
    assert chosen(key)[0] == "triton"
    with pytest.raises(RuntimeError, match=r"cuda:0 does not take the CUDA kernels.*OUT_OF_MEMORY"):
        backends.select_backend("cuda", key)
    driver.fail("", 0)
    assert chosen(key)[0] == "triton"
    assert backends.select_backend("cuda", key).name == "cuda"
    assert chosen(key)[0] == "triton"
    assert chosen(single("cuda:1")) == ("cuda", [])


def test_ranks_compare_the_engines_that_run(both: Any) -> None:
    """A rank whose device refuses the kernels does not claim to run what the others run."""
    both(refusing(1))
    for device, engine in (("cuda:0", "cuda"), ("cuda:1", "triton")):
        with FakeTensorMode():
            optimizer = NGNMDv1.simple([torch.nn.Parameter(torch.empty(3, device=device))])
        agreement = optimizer._agreement(None, optimizer._group_values()[0], {})
        assert agreement.items["the backend"] == engine == chosen(single(device))[0]


@pytest.mark.parametrize("devices", [(), (1,), (0, 1)])
def test_the_doctor_names_the_devices_that_refuse(
    devices: tuple[int, ...], both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(refusing(*devices))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    lines = {line.split()[0]: line for line in doctor.report().splitlines() if line}
    assert ("available (code for" in lines["cuda"]) == (len(devices) < 2)
    refused = [f"cuda:{i}" for i in devices]
    assert re.findall(r"(cuda:\d) does not take", lines["cuda"]) == refused
    assert ("no kernel image" in lines["cuda"]) == bool(devices)
    assert lines["triton"].split() == ["triton", "available"]


def test_kernels_that_were_not_built_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton serves, and nothing is said."""
    pytest.importorskip("triton")
    from ngn_bench.gpu.stub_kernels import counting_backend

    monkeypatch.setattr(backends, "is_built", lambda name: False)
    load = backends._load
    stub = counting_backend("cuda")[1]
    monkeypatch.setattr(backends, "_load", lambda name: stub if name == "triton" else load(name))
    assert chosen(single("cuda:0")) == ("triton", [])


# Arguments


GOOD: dict[str, Any] = {
    **dict.fromkeys(("table", "chunks", "groups", "inputs", "sums", "totals", "partials"), 8),
    **dict.fromkeys(("counts", "sizes", "ticket"), 8),
    **dict.fromkeys(("rows", "chunk_count", "group_count", "bucket_count"), 1),
    **{"chunk_size": 2048, "index": 0, "device": 0, "rounding": Rounding.NEAREST},
    **dict.fromkeys(("x_type", "g_type", "m_type", "v_type"), DType.FLOAT32),
    "rule": 0,
    "updates": True,
}


def arguments(changes: dict[str, Any]) -> dict[str, Any]:
    """Those of a launch; some of them are flags of its rule."""
    flags = {f.name.lower(): changes[f.name.lower()] for f in Flag if f.name.lower() in changes}
    others = {name: value for name, value in changes.items() if name not in flags}
    return {**GOOD, "rule": Rule(**flags).flags, **others}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x_type": DType.FLOAT64}, "parameters and gradients must be"),
        ({"g_type": DType.INT8}, "parameters and gradients must be"),
        ({"m_type": DType.UINT8}, "m must be"),
        ({"v_type": DType.INT8}, "v must be"),
        ({"v_type": 77}, "no such element type"),
        ({"rounding": 3}, "no such rounding"),
        ({"rule": 1 << len(Flag)}, "no such rule"),
        ({"rounding": Rounding.EXACT}, "exact rounding needs bfloat16"),
        ({"chunk_count": 0}, "no number of blocks"),
        ({"chunk_count": 2**31}, "no number of blocks"),
        ({"chunk_size": 100}, "quantisation blocks"),
        ({"momentum": True, "coordinate": True}, "no kernel has this rule"),
        ({"updates": False, "momentum": True}, "no kernel has this rule"),
        ({"updates": False, "regularised": True}, "no kernel has this rule"),
        ({"updates": False, "directed": True, "regularised": True}, "no kernel has this rule"),
        ({"directed": True, "rms": True}, "given directions have no rms"),
        ({"directed": True, "coordinate": True}, "given directions have no rms"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], said: str, driver: StubDriver) -> None:
    _cuda.Launch(engine=driver.engine, **GOOD)
    with pytest.raises(ValueError, match=said):
        _cuda.Launch(engine=driver.engine, **arguments(changes))


HALF = dict.fromkeys(("x_type", "g_type"), DType.BFLOAT16)
MOMENTUM_RMS = {"momentum": True, "rms": True}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "apply_plain"),
        (HALF, "apply_plain_half"),
        ({"x_type": DType.FLOAT16}, "apply_plain"),
        ({**HALF, "momentum": True}, "apply_momentum"),
        ({**HALF, "rms": True}, "apply_rms"),
        ({"v_type": DType.UINT8}, "apply_plain"),
        ({"v_type": DType.UINT8, "rms": True}, "apply_rms_narrow"),
        ({"m_type": DType.BFLOAT16, **MOMENTUM_RMS}, "apply_momentum_rms_narrow"),
        ({**HALF, "rounding": Rounding.STOCHASTIC}, "apply_plain_narrow"),
        ({**MOMENTUM_RMS, "regularised": True}, "apply_momentum_rms"),
        ({**HALF, "directed": True}, "apply_plain"),
        ({**HALF, "directed": True, "rounding": Rounding.EXACT}, "apply_plain_narrow"),
        ({"updates": False, **HALF, "directed": True}, "reduce_directed"),
        ({"updates": False}, "reduce_norm"),
        ({"updates": False, **HALF, "v_type": DType.UINT8}, "reduce_norm_half"),
        ({"updates": False, "g_type": DType.FLOAT16}, "reduce_norm_half"),
        ({"updates": False, "rms": True, "m_type": DType.INT8}, "reduce_rms"),
        ({"updates": False, "rms": True, "v_type": DType.UINT8}, "reduce_rms_narrow"),
        ({"updates": False, "rms": True, **HALF, "rounding": Rounding.EXACT}, "reduce_rms"),
        (
            {
                "updates": False,
                "rms": True,
                "regularised": True,
                **HALF,
                "rounding": Rounding.EXACT,
            },
            "reduce_aligned_narrow",
        ),
    ],
)
def test_the_columns_that_a_pass_reads_choose_its_kernel(
    changes: dict[str, Any], name: str, driver: StubDriver
) -> None:
    assert _cuda.Launch(engine=driver.engine, **arguments(changes)).name == f"ngn_{name}"
