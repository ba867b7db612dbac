"""What several commands share: options, the checks before a measurement, outputs, exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from ngn_kernels.formats import ROUNDINGS

from .. import environment, report
from ..contenders.registry import DTYPES
from ..errors import INTERRUPTED, BenchError, unknown_name
from ..pages import plots

MAX_THREADS = 1024
PICTURES = (".png", ".svg", ".pdf")

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
Number = TypeVar("Number", int, float)


class Parser(argparse.ArgumentParser):
    """Takes no shortened options: `--lr` of one command is not `--lr-of-another`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})


def _number(kind: type[Number], text: str) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def positive(kind: type[Number], largest: float = float("inf")) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        value = _number(kind, text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be over 0, not {text}")
        if value > largest:
            raise argparse.ArgumentTypeError(f"must be at most {largest:,}, not {text}")
        return value

    return parse


def at_least_zero(text: str) -> float:
    value = _number(float, text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text}")
    return value


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def add_seconds(parser: argparse.ArgumentParser, default: float) -> None:
    parser.add_argument(
        "--seconds",
        type=positive(float),
        default=default,
        help=f"measuring time (default {default:g})",
    )


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 (default: a GPU if any)"
    )
    parser.add_argument(
        "--threads", type=positive(int, MAX_THREADS), help="CPU threads (default: torch's)"
    )


def add_format_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or float64")
    parser.add_argument(
        "--state",
        type=names,
        default=["float32"],
        metavar="NAMES",
        help="how NGN rules store m and v: float32, bfloat16, 8bit, 8bit+bfloat16, with commas",
    )
    parser.add_argument(
        "--rounding",
        choices=ROUNDINGS,
        default="nearest",
        help="how they store parameters of 16 bits",
    )


def add_measurement_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    add_seconds(parser, seconds)
    add_machine_options(parser)
    add_output_options(parser)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the result (.png, .svg, .pdf)"
    )


def formats_given(args: argparse.Namespace) -> bool:
    return (args.state, args.rounding) != (["float32"], "nearest")


def select_machine(args: argparse.Namespace) -> torch.device:
    """Set the number of threads and the current GPU that the options ask for."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = environment.select_device(args.device)
    if device.type == "cuda" and device.index is not None:
        # Events and kernels go to the current device.
        torch.cuda.set_device(device)
    return device


def prepare(args: argparse.Namespace) -> torch.device:
    """The device of a measurement whose results can be written."""
    device = select_machine(args)
    check_outputs(args)
    return device


def find_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES[name]


def check_outputs(args: argparse.Namespace) -> None:
    """Fail before measuring, not after."""
    report.require_writable(args.json)
    if args.plot is not None:
        if args.plot.suffix not in PICTURES:
            raise BenchError(f"--plot {args.plot}: the name must end in .png, .svg or .pdf")
        report.require_writable(args.plot)
        plots.require_matplotlib()


def write_outputs(
    args: argparse.Namespace,
    record: dict[str, Any],
    plot: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Write the record and the picture of it that the options ask for, and print their paths."""
    if args.json:
        report.write_json(args.json, record)
        print(f"wrote {args.json}")
    if plot and args.plot:
        plot(record, args.plot)
        print(f"wrote {args.plot}")


def exit_status(interrupted: bool, rows: Sequence[dict[str, Any]] = ()) -> int:
    """Of a measurement: interrupted, with wrong answers, or 0."""
    if interrupted:
        print("ngn-bench: interrupted; the results above are what was measured", file=sys.stderr)
        return INTERRUPTED
    wrong = list(dict.fromkeys(row["label"] for row in rows if row["verdict"]["ok"] is False))
    if wrong:
        print(f"ngn-bench: wrong answers from {', '.join(wrong)}", file=sys.stderr)
        return 1
    return 0
