"""Sets of parameter shapes to run an optimizer on, by name, from a file, or from any model."""

from __future__ import annotations

import importlib
import math
import re
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .. import models
from ..environment import first_line
from ..errors import BenchError, unknown_name
from ..report import parse_json

Shape = tuple[int, ...]

MANY_SMALL = "many-small"
NAMED = (*models.MODELS, MANY_SMALL)
FORMS = (
    "Also: one:64M (one tensor of 64 million), many:500x2K (500 tensors of 2,000), "
    "package.module:function (a model factory of your own), or --shapes file.json."
)
MAX_ELEMENTS = 2**40
MAX_TENSORS = 10**6


@dataclass(frozen=True)
class Workload:
    """Parameter shapes under a name."""

    name: str
    shapes: tuple[Shape, ...]

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def tensors(self) -> int:
        return len(self.shapes)


def count(number: float) -> str:
    """A number with a short suffix: 70.8M, 1.02B, 270k."""
    for scale, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g}{suffix}"
    return f"{number:g}"


def parse_count(text: str) -> int:
    """An element count as people write it: 4096, 64k, 4M, 1.5B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMbBgG]?)", text)
    if match is None:
        shown = reprlib.repr(text)
        raise BenchError(f"{shown} is not a size; write for example 4096, 64k, 4M or 1.5B")
    scale = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}[match[2].lower()]
    size = float(match[1]) * scale
    if not 0.5 < size <= MAX_ELEMENTS:
        shown = reprlib.repr(text)
        raise BenchError(f"a size must be between 1 and 2^40 elements, not {shown}")
    return round(size)


def find_workload(name: str) -> Workload:
    """The workload called `name`; unknown names raise with the nearest known one."""
    if name == MANY_SMALL:
        return Workload(name, ((1000,),) * 1000)
    if name in models.MODELS:
        return Workload(name, tuple(models.parameter_shapes(name).values()))
    if name.startswith("one:"):
        return Workload(name, ((parse_count(name[len("one:") :]),),))
    if name.startswith("many:"):
        tensors, cross, size = name[len("many:") :].partition("x")
        if not cross:
            raise BenchError(f"{name!r} is not a workload; write many:COUNTxSIZE, as many:500x2K")
        number = parse_count(tensors)
        if number > MAX_TENSORS:
            raise BenchError(f"{name!r} has over {MAX_TENSORS:,} tensors")
        return Workload(name, ((parse_count(size),),) * number)
    if ":" in name:
        return Workload(name, _factory_shapes(name))
    raise unknown_name("workload", name, NAMED, FORMS)


def _factory_shapes(path: str) -> tuple[Shape, ...]:
    """Shapes of the model that the importable function `package.module:function` returns."""
    module_name, _, attribute = path.partition(":")
    if "" not in sys.path:  # as it is for a console script
        sys.path.append("")
    try:
        factory: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise BenchError(f"cannot find the model factory {path!r}: {error}\n{FORMS}") from None
    except (Exception, SystemExit) as error:  # the user's own code can raise anything
        raise BenchError(
            f"cannot import {module_name!r}: {type(error).__name__}: {first_line(error)}"
        ) from None
    if not callable(factory):
        raise BenchError(f"{path!r} is a {type(factory).__name__}, not a function or class")

    def build() -> nn.Module:
        model = factory()
        if not isinstance(model, nn.Module):
            raise BenchError(f"{path!r} returned a {type(model).__name__}, not a torch.nn.Module")
        return model

    try:
        try:
            shapes = models.shapes_of(build)
        except Exception:  # not every model can be built without memory
            shapes = models.shapes_of(build, "cpu")
    except BenchError:
        raise
    except (Exception, SystemExit) as error:
        raise BenchError(
            f"{path!r} failed when called without arguments: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from None
    if not shapes:
        raise BenchError(f"the model of {path!r} has no trainable parameters")
    return tuple(shapes.values())


def read_shapes(path: Path) -> Workload:
    """A workload from a JSON file: a list of shapes, or an object from names to shapes."""
    data = parse_json(path, "the shapes file ")
    wanted = "write a list of shapes, as [[512, 512], [512]], or an object from names to shapes"
    entries = list(data.values()) if isinstance(data, dict) else data
    if not isinstance(entries, list) or not entries:
        raise BenchError(f"the shapes file {path} has no list of shapes: {wanted}")
    shapes = []
    for index, entry in enumerate(entries):
        sizes = entry if isinstance(entry, list) else [entry]
        if not all(type(size) is int and size >= 0 for size in sizes):
            shown = reprlib.repr(entry)
            raise BenchError(f"entry {index} of {path} is {shown}, not a shape: {wanted}")
        if math.prod(sizes) > MAX_ELEMENTS:
            raise BenchError(f"entry {index} of {path} has over 2^40 elements")
        shapes.append(tuple(sizes))
    if not any(math.prod(shape) for shape in shapes):
        raise BenchError(f"the shapes file {path} has only empty tensors")
    return Workload(f"shapes:{path.stem}", tuple(shapes))
