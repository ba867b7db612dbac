"""`python -m ngn_bench.gpu.triton_report`: what every kernel compiles to, for GPUs that need not be here.

Compiling needs no driver and no GPU: the target is named, and what comes out is read.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from ngn_kernels.backends.triton import THREADS, column_types, constants, options
from ngn_kernels.layout import Flag
from ngn_kernels.planning.rows import BucketKey
from ngn_kernels.rules import RULES, Rule, rule_of

POINTERS = {
    "table": "*i64",
    "chunks": "*i64",
    "groups": "*fp64",
    "inputs": "*fp64",
    "totals": "*fp64",
    "sums": "*fp64",
    "partials": "*fp64",
    "counts": "*i64",
    "sizes": "*fp64",
    "ticket": "*i32",
}
STORAGE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Target:
    """A GPU to compile for, and how many warps of it a number of registers leaves room for."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    most_warps: int  # of one multiprocessor, or of one SIMD unit
    registers: int  # of one lane, shared by those warps
    granule: int

    @property
    def triton(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp_size)

    def occupancy(self, registers: int) -> float:
        """The part of the warps that can be resident, by whole blocks on NVIDIA."""
        rounded = -(-registers // self.granule) * self.granule
        warps = min(self.most_warps, self.registers // rounded)
        if self.backend == "cuda":
            warps -= warps % (THREADS // self.warp_size)
        return warps / self.most_warps


TARGETS = (
    Target("sm_80", "cuda", 80, 32, most_warps=64, registers=2048, granule=8),
    Target("sm_90", "cuda", 90, 32, most_warps=64, registers=2048, granule=8),
    Target("sm_100", "cuda", 100, 32, most_warps=64, registers=2048, granule=8),
    Target("gfx942", "hip", "gfx942", 64, most_warps=8, registers=512, granule=8),
    Target("gfx1100", "hip", "gfx1100", 32, most_warps=16, registers=1536, granule=24),
)


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel."""

    kernel: str
    rule: Rule
    param: torch.dtype
    grad: torch.dtype
    m: torch.dtype = torch.float32
    v: torch.dtype = torch.float32
    rounding: str = "nearest"

    @property
    def key(self) -> BucketKey:
        device = torch.device("cuda", 0)
        return BucketKey(device, self.param, self.grad, self.m, self.v, self.rounding)

    @property
    def constants(self) -> dict[str, Any]:
        return constants(self.kernel, self.rule, self.key)

    @property
    def columns(self) -> dict[str, tuple[torch.dtype, bool]]:
        """The element type of each column that the kernel reads, and whether it writes it."""
        written = self.rule.apply_writes if self.kernel == "apply" else ()
        types = column_types(self.kernel, self.rule, self.key)
        columns = {column: (dtype, column in written) for column, dtype in types.items()}
        if self.rounding == "exact" and "x" in types:
            columns["remainder"] = torch.int16, "x" in written
        return columns

    def __str__(self) -> str:
        names = [flag.name.lower() for flag in Flag if self.rule.has(flag)] or ["plain"]
        text = f"{self.kernel} {'+'.join(names)} x:{short(self.param)} g:{short(self.grad)}"
        read = column_types(self.kernel, self.rule, self.key)
        for column in "mv":
            if read.get(column, torch.float32) != torch.float32:
                text += f" {column}:{short(read[column])}"
        return text if self.rounding == "nearest" else f"{text} {self.rounding}"


DIRECTED = RULES["NGNMuon"].with_directions()


def variants(types: tuple[torch.dtype, ...] = STORAGE) -> Iterator[Variant]:
    """Every specialisation with float32 state and these storage types that an optimizer can ask
    for, once."""
    named = (*RULES.values(), DIRECTED)
    rules = {replace(rule, momentum=m) for rule in named for m in {rule.momentum, False}}
    ordered = sorted(
        rules, key=lambda r: (r.rms, r.directed, r.coordinate, r.regularised, r.momentum)
    )
    seen = set()
    for kernel, rule, param, grad in product(("reduce", "apply"), ordered, types, types):
        if kernel == "reduce" and (rule.coordinate or rule.momentum):
            continue
        variant = Variant(kernel, rule, param, grad)
        identity = kernel, *map(str, variant.constants.values())
        if identity not in seen:
            seen.add(identity)
            yield variant
    for name in ("NGNM", "NGNMDv1", "NGNMDv2"):
        yield Variant("apply", rule_of(name, "adamw"), torch.float32, torch.float32)
    yield Variant("apply", replace(DIRECTED, adamw_decay=True), torch.float32, torch.float32)
    ahead = rule_of("NGNMuon", "adamw", nesterov=True)
    for rule in (ahead, ahead.with_directions()):
        yield Variant("apply", rule, torch.float32, torch.float32)


def narrow_variants() -> Iterator[Variant]:
    """Of narrow state and rounded parameters there are many: these stand for them."""
    single, half = torch.float32, torch.bfloat16
    quantised = torch.int8, torch.uint8
    yield Variant("apply", RULES["NGNMDv1"], single, single, half, half)
    yield Variant("apply", RULES["NGNMDv1"], single, single, torch.int8, half)
    yield Variant("apply", RULES["NGNMDv1"], single, single, *quantised)
    yield Variant("apply", rule_of("NGNMDv1", "adamw"), single, single, *quantised)
    yield Variant("reduce", RULES["NGNMDv1"], single, single, *quantised)
    yield Variant("apply", RULES["NGNMDv2"], single, single, *quantised)
    yield Variant("apply", DIRECTED, single, half, torch.int8, torch.float32)
    yield Variant("apply", rule_of("NGNMuon", "adamw", nesterov=True), single, single, *quantised)
    yield Variant("apply", RULES["NGNMDv1W"], half, half, *quantised, "exact")
    yield Variant("reduce", RULES["NGNMDv1W"], half, half, *quantised, "exact")


def compile_variant(variant: Variant, target: Target) -> Any:
    """Ahead of time, as the launch would do it."""
    import triton
    from triton.compiler import ASTSource

    from ngn_kernels.backends.triton import kernels

    kernel = getattr(kernels, variant.kernel)
    constants = variant.constants
    signature = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i32")
        for name in kernel.arg_names
    }
    # torch's allocations are aligned, as the launch would notice.
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in POINTERS
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    chosen = options(target.triton, variant.v)
    return triton.compile(source, target=target.triton, options=chosen)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers of a thread, what was spilled, widths of accesses."""

    registers: int
    spilled: int  # bytes of a thread
    spilled_in_loops: int  # instructions that store or load them again and again
    shared: int
    loads: Counter[int]  # bytes of one access -> number of vector instructions of that width
    stores: Counter[int]


def resources(compiled: Any, target: Target) -> Resources:
    read = _read_cubin if target.backend == "cuda" else _read_amdgcn
    return read(compiled)


def _read_cubin(compiled: Any) -> Resources:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                [knobs.nvidia.cuobjdump.path, what, file.name],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for what in ("--dump-resource-usage", "--dump-sass")
        )
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    loads, stores = (
        Counter(
            int(lanes) * int(bits) // 8
            for lanes, bits in re.findall(
                rf"{kind}\.global[\w.:]*?\.v(\d)\.b(\d+)", compiled.asm["ptx"]
            )
        )
        for kind in ("ld", "st")
    )
    # The kernels have no arrays of their own: what lies on the stack was spilled.
    return Resources(
        found["REG"],
        found["STACK"] + found["LOCAL"],
        spills_in_loops(code),
        compiled.metadata.shared,
        loads,
        stores,
    )


def spills_in_loops(code: str) -> int:
    """How many instructions between a backward branch and its target reach for local memory."""
    placed = [
        (int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", code)
    ]
    loops = [
        (int(target[1], 16), at)
        for at, text in placed
        if (target := re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)) and int(target[1], 16) < at
    ]
    spills = [at for at, text in placed if re.search(r"\b(STL|LDL)\b", text)]
    return sum(any(first <= at <= last for first, last in loops) for at in spills)


def _read_amdgcn(compiled: Any) -> Resources:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", text)
        assert match, f"the assembly names no {name}"
        return int(match[1])

    loads, stores = (
        Counter(
            4 * int(words) if words else int(bits) // 8
            for words, bits in re.findall(
                rf"(?:global|buffer)_{kind}_(?:dwordx(\d)|b(\d+))\b", text
            )
        )
        for kind in ("load", "store")
    )
    # Registers that were spilled, to other registers or not, and scratch memory.
    kinds = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    spilled = sum(map(number, kinds))
    # Where they are is not looked for.
    return Resources(
        number("vgpr_count"), spilled, spilled, compiled.metadata.shared, loads, stores
    )


def short(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m ngn_bench.gpu.triton_report", description=__doc__
    )
    parser.add_argument(
        "--target",
        action="append",
        choices=[t.name for t in TARGETS],
        help="may be repeated; all by default",
    )
    parser.add_argument(
        "--mixed", action="store_true", help="also gradients of another type than parameters"
    )
    chosen = parser.parse_args(arguments)
    try:
        import triton
    except ImportError:
        sys.exit("Triton is not installed: pip install 'triton>=3.4'")
    targets = [t for t in TARGETS if not chosen.target or t.name in chosen.target]
    print(
        f"Triton {triton.__version__}: registers of a thread (resident warps), widest load and store in bytes"
    )
    print(f"{'':60}" + "".join(f"{t.name:>18}" for t in targets))
    for variant in (*variants(), *narrow_variants()):
        if variant.param != variant.grad and not chosen.mixed:
            continue
        cells = []
        for target in targets:
            used = resources(compile_variant(variant, target), target)
            widths = f"{max(used.loads, default=0)}/{max(used.stores, default=0)}"
            spills = f" spills {used.spilled}!" if used.spilled else ""
            cells.append(
                f"{used.registers} ({target.occupancy(used.registers):.0%}) {widths}{spills}"
            )
        print(f"{variant!s:60}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
