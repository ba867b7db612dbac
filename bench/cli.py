"""The command line `ngn-bench`. Modules that need torch are imported when a command runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BenchError

if TYPE_CHECKING:
    import torch

    from .contenders.registry import Contender
    from .timing.step import Settings
    from .timing.workloads import Workload

USAGE_ERROR = 2
INTERRUPTED = 130
MAX_THREADS = 1024
MAX_RANKS = 64

DESCRIPTION = """\
What does an NGN step cost beside AdamW, and how far are both from what the memory allows?
And how far from the best step size do these optimizers still train?

  ngn-bench step                          the table, in about a minute
  ngn-bench step --workload gpt2 --contenders ngnmdv1,ngnm
  ngn-bench train --model transformer++-70m
  ngn-bench roofline --plot roofline.png
  ngn-bench ranks --ranks 1,2,4
  ngn-bench compare old.json new.json
"""

DEFAULT_WORKLOADS = ("transformer++-70m", "resnet20")
SMALL_MACHINE_WORKLOADS = ("resnet18", "resnet20")
CPU_TABLE_ROWS = (
    "ngnmdv1",
    "ngnmdv1/bfloat16",
    "ngnmdv1/8bit+bfloat16",
    "ngnmdv1/8bit",
    "ngnmdv1/bfloat16/exact@bfloat16",
    "ngnm",
    "ngnm/bfloat16",
    "ngnm/8bit",
    "ngnmdv2",
    "ngnmdv2/bfloat16",
    "ngnmdv2/8bit+bfloat16",
    "ngnmdv2/8bit",
    "ngn",
)
CPU_TABLE = (
    ("transformer++-70m", (*CPU_TABLE_ROWS, "ngnmdv1:plain", "momo-adam", "rivals")),
    ("one:4M", CPU_TABLE_ROWS),
    ("one:1M", CPU_TABLE_ROWS),
    ("resnet20", CPU_TABLE_ROWS),
    ("many-small", CPU_TABLE_ROWS),
)
DEFAULT_JSON = Path("ngn-bench-step.json")
DEFAULT_PLOT = Path("ngn-bench-step.png")
LOOP_MODELS = ("mlp", "small-transformer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    # Neither torch's allocator nor its profiler should write between our lines.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    words = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser().parse_args(words)
    args.command = _recorded_command(words)
    _interrupt_on_terminate()
    try:
        return int(args.func(args) or 0)
    except BenchError as error:
        print(f"ngn-bench: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("ngn-bench: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _recorded_command(words: Sequence[str]) -> list[str]:
    """The command for the record: all of it that says what was measured."""
    kept = ["ngn-bench"]
    skip_value = False
    for word in words:
        if skip_value:
            skip_value = False
        elif word in ("--json", "--plot"):
            skip_value = True
        elif not word.startswith(("--json=", "--plot=")):
            kept.append(word)
    return kept


def _interrupt_on_terminate() -> None:
    """Let SIGTERM end a run as Ctrl-C does, so that what was measured is kept."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ngn-bench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_step(commands)
    _add_train(commands)
    _add_roofline(commands)
    _add_ranks(commands)
    _add_compare(commands)
    _add_info(commands)
    from .lab.cli import add_subcommands

    add_subcommands(commands)
    return parser


def _positive(kind: type, largest: float = float("inf")) -> Any:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be over 0, not {text}")
        if value > largest:
            raise argparse.ArgumentTypeError(f"must be at most {largest:,}, not {text}")
        return value

    return parse


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 (default: a GPU if any)"
    )
    parser.add_argument(
        "--threads", type=_positive(int, MAX_THREADS), help="CPU threads (default: torch's)"
    )


def _add_format_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state",
        type=_names,
        default=["float32"],
        metavar="NAMES",
        help="how NGN rules store m and v: float32, bfloat16, 8bit, 8bit+bfloat16, with commas",
    )
    parser.add_argument(
        "--rounding",
        choices=("nearest", "stochastic", "exact"),
        default="nearest",
        help="how they store parameters of 16 bits",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the result (.png, .svg, .pdf)"
    )


def _add_step(commands: Any) -> None:
    parser = commands.add_parser(
        "step",
        help="time one optimizer step, contenders side by side",
        description="Time whole step() calls of the NGN optimizers beside torch's and others, in "
        "turns, after checking each one's result on a small case.",
        epilog="Workloads: model names (resnet20, resnet18, vit-tiny, gpt2, transformer++-70m, …), "
        "many-small, one:64M, many:500x2K, or package.module:function for a model of your own. "
        "Contenders: ngnmdv1 (fastest backend), ngnmdv1:cpu, ngnmdv1/8bit (its m and v), "
        "ngnmdv1/bfloat16/exact@bfloat16 (on bfloat16 parameters), adamw, adamw:fused, sgd:fused, "
        "ngnmdv1:plain, momo, momo-adam, or the groups ngn-all, torch-all, momo-all, rivals, all; "
        "--list shows them. "
        f"Without options, results are also written to {DEFAULT_JSON} and {DEFAULT_PLOT}.",
    )
    parser.add_argument(
        "--workload", type=_names, metavar="NAMES", help="one or several, with commas"
    )
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="JSON list of shapes to run on")
    parser.add_argument("--contenders", type=_names, metavar="NAMES", help="default: all that run")
    parser.add_argument(
        "--preset",
        choices=("default", "cpu-table"),
        default="default",
        help="cpu-table: four rules and their formats on five workloads, as ratios to fused AdamW",
    )
    parser.add_argument(
        "--list", action="store_true", help="show the contenders, and why some do not run here"
    )
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or float64")
    _add_format_options(parser)
    parser.add_argument(
        "--seconds", type=_positive(float), default=40.0, help="measuring time (default 40)"
    )
    parser.add_argument("--compiled", action="store_true", help="also AdamW under torch.compile")
    parser.add_argument(
        "--cold",
        action=argparse.BooleanOptionalAction,
        help="empty the caches before every step (default: on a GPU only)",
    )
    _add_machine_options(parser)
    _add_output_options(parser)
    parser.set_defaults(func=_run_step)


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="time an iteration and its optimizer update in a training loop",
        description="Train copies of a model with each optimizer in turns; show the time of an "
        "iteration and of the optimizer's part. Batches are sized to the machine unless given.",
    )
    parser.add_argument("--model", type=_names, metavar="NAMES", help="default: transformer++-70m")
    parser.add_argument(
        "--preset", choices=("loops",), help="loops: an MLP and a small Transformer"
    )
    parser.add_argument(
        "--optimizers", type=_names, metavar="NAMES", default=["ngnmdv1"], help="beside fused AdamW"
    )
    parser.add_argument(
        "--batch", type=_positive(int, 2**40), help="sequences or images in a batch"
    )
    parser.add_argument("--context", type=_positive(int, 2**24), help="tokens in a sequence")
    parser.add_argument("--clip", type=_positive(float), help="clip the gradient norm to this")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on the bytes of this file")
    parser.add_argument(
        "--autocast",
        action=argparse.BooleanOptionalAction,
        help="bfloat16 autocast (default: on a GPU only)",
    )
    parser.add_argument(
        "--seconds", type=_positive(float), default=60.0, help="measuring time (default 60)"
    )
    _add_machine_options(parser)
    _add_output_options(parser)
    parser.set_defaults(func=_run_train)


def _add_roofline(commands: Any) -> None:
    parser = commands.add_parser(
        "roofline",
        help="measure memory bandwidth, and each rule's shortest step from it",
        description="Measure read, copy, triad and update bandwidth over array sizes, and derive the "
        "shortest step that the memory allows for each rule.",
    )
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or float64")
    _add_format_options(parser)
    parser.add_argument(
        "--seconds", type=_positive(float), default=15.0, help="measuring time (default 15)"
    )
    parser.add_argument(
        "--largest", default=None, metavar="SIZE", help="elements of the largest array, as 32M"
    )
    _add_machine_options(parser)
    _add_output_options(parser)
    parser.set_defaults(func=_run_roofline)


def _rank_numbers(text: str) -> tuple[int, ...]:
    parse = _positive(int, MAX_RANKS)
    return tuple(dict.fromkeys(parse(word) for word in text.split(",")))


def _add_ranks(commands: Any) -> None:
    parser = commands.add_parser(
        "ranks",
        help="time a step on several local processes, under DDP and FSDP2",
        description="Start local processes (gloo) and train a model of many small tensors in each "
        "layout, with NGN-MDv1 and torch's fused AdamW in turns. The exit status is 1 if ranks that "
        "should have the same numbers do not. With --project, nothing is started: what the exchange "
        "of a step would cost on many GPUs, from a model of its latency.",
    )
    parser.add_argument(
        "--ranks", type=_rank_numbers, metavar="NUMBERS", help="processes (default 1,2,4)"
    )
    parser.add_argument(
        "--tensors", type=_positive(int, 10**5), help="tensors of the model (default 300)"
    )
    parser.add_argument("--seconds", type=_positive(float), help="measuring time (default 60)")
    parser.add_argument(
        "--threads", type=_positive(int, MAX_THREADS), help="of each process (default 1)"
    )
    parser.add_argument("--project", action="store_true", help="the projection to 16,384 GPUs")
    _add_output_options(parser)
    parser.set_defaults(func=_run_ranks)


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare two results; exit status 1 if something became slower",
        description="Compare two result files row by row. A change inside the noise band counts as "
        "none. The exit status is 1 if any row became slower, or is no longer timed because its "
        "contender fails or gives a wrong answer.",
    )
    parser.add_argument("old", type=Path, help="JSON of an earlier run")
    parser.add_argument("new", type=Path, help="JSON of a later run")
    parser.add_argument(
        "--threshold", type=_positive(float), default=0.05, help="least relevant change (0.05)"
    )
    parser.add_argument(
        "--metric", choices=("time", "ratio"), default="time", help="ratio: against fused AdamW"
    )
    parser.set_defaults(func=_run_compare)


def _add_info(commands: Any) -> None:
    parser = commands.add_parser(
        "info", help="versions, hardware and backends", description="What this machine can run."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it as JSON")
    _add_machine_options(parser)
    parser.set_defaults(func=_run_info)


def _prepare_machine(args: argparse.Namespace) -> torch.device:
    import torch

    from .environment import select_device

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = select_device(args.device)
    if device.type == "cuda" and device.index is not None:
        # Events and kernels go to the current device.
        torch.cuda.set_device(device)
    return device


def _find_dtype(name: str) -> torch.dtype:
    from .contenders.registry import DTYPES
    from .errors import unknown_name

    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES[name]


def _check_outputs(args: argparse.Namespace) -> None:
    """Fail before measuring, not after."""
    from . import report
    from .pages import plots

    report.require_writable(args.json)
    if args.plot is not None:
        if args.plot.suffix not in (".png", ".svg", ".pdf"):
            raise BenchError(f"--plot {args.plot}: the name must end in .png, .svg or .pdf")
        report.require_writable(args.plot)
        plots.require_matplotlib()


def _run_step(args: argparse.Namespace) -> int:
    device = _prepare_machine(args)
    from . import report
    from .environment import describe, machine_line
    from .pages import plots
    from .timing.step import Settings, StepResult, run_step
    from .timing.step_tables import (
        contender_table,
        not_run_lines,
        ratio_table,
        slower_lines,
        step_tables,
    )

    if args.list:
        report.print_table(contender_table(device))
        return 0
    if not (args.workload or args.shapes or args.contenders or args.preset != "default"):
        args.json = args.json or DEFAULT_JSON
        args.plot = args.plot or DEFAULT_PLOT
    _check_outputs(args)
    cold = device.type == "cuda" if args.cold is None else args.cold
    settings = Settings(device, _find_dtype(args.dtype), args.seconds, cold)
    environment = describe(device)
    plan, left_out = _plan_step(args, settings)
    plan = [(workload, _stored(chosen, args)) for workload, chosen in plan]

    def as_record(result: StepResult) -> dict[str, Any]:
        data = result.as_json()
        return report.record("step", args.command, environment, **data, left_out=left_out)

    def keep(result: StepResult) -> None:
        if args.json:
            report.write_json(args.json, as_record(result))

    print(machine_line(environment))
    with report.progress_bar("measuring") as progress:
        result = run_step(plan, settings, progress, keep)
    record = as_record(result)
    for table in step_tables(record):
        report.print_table(table)
    if args.preset == "cpu-table":
        report.print_table(ratio_table(record))
        print("\n".join(slower_lines(record)))
    for line in not_run_lines(record):
        print(line)
    _announce(args.json)
    if args.plot and any(row["ratio"] is not None for row in record["rows"]):
        plots.plot_step(record, args.plot)
        _announce(args.plot)
    return _finish(result.interrupted, record["rows"])


def _formats_given(args: argparse.Namespace) -> bool:
    return (args.state, args.rounding) != (["float32"], "nearest")


def _stored(contenders: list[Contender], args: argparse.Namespace) -> list[Contender]:
    """Each contender once, and those of this library once for each `--state`."""
    from .contenders.registry import stored_as

    if not _formats_given(args):
        return contenders
    if any("/" in contender.name for contender in contenders):
        raise BenchError("--contenders names formats already; leave out --state and --rounding")
    each = [stored_as(c, state, args.rounding) for c in contenders for state in args.state]
    return list({contender.name: contender for contender in each}.values())


def _announce(path: Path | None) -> None:
    if path is not None:
        print(f"wrote {path}")


def _finish(interrupted: bool, rows: Sequence[dict[str, Any]] = ()) -> int:
    if interrupted:
        print("ngn-bench: interrupted; the results above are what was measured", file=sys.stderr)
        return INTERRUPTED
    wrong = list(dict.fromkeys(row["label"] for row in rows if row["verdict"]["ok"] is False))
    if wrong:
        print(f"ngn-bench: wrong answers from {', '.join(wrong)}", file=sys.stderr)
        return 1
    return 0


def _plan_step(
    args: argparse.Namespace, settings: Settings
) -> tuple[list[tuple[Workload, list[Contender]]], dict[str, dict[str, str]]]:
    """Workloads with their contenders, and the contenders left out by default with the reason."""
    from .contenders.registry import is_reference, select
    from .environment import fastest_backend
    from .timing.step import SLOW_REFERENCE_PARAMETERS, require_memory
    from .timing.workloads import find_workload, read_shapes

    backend = fastest_backend(settings.device, settings.dtype)
    left_out: dict[str, dict[str, str]] = {}
    if args.preset == "cpu-table":
        if args.workload or args.shapes or args.contenders or _formats_given(args):
            raise BenchError(
                "--preset cpu-table fixes workloads, contenders and their formats; leave those out"
            )
        return [
            (find_workload(name), select(names, backend, args.compiled))
            for name, names in CPU_TABLE
        ], left_out

    def with_contenders(workload: Workload) -> tuple[Workload, list[Contender]]:
        if args.contenders:
            return workload, select(args.contenders, backend, args.compiled)
        chosen = select(["all"], backend, args.compiled)
        if workload.parameters <= SLOW_REFERENCE_PARAMETERS or backend == "reference":
            return workload, chosen
        slow = [contender for contender in chosen if is_reference(contender.name)]
        reason = (
            f"left out by default over {SLOW_REFERENCE_PARAMETERS // 10**6}M parameters; "
            "--contenders all measures them"
        )
        left_out[workload.name] = {contender.label: reason for contender in slow}
        return workload, [contender for contender in chosen if contender not in slow]

    workloads = [find_workload(name) for name in dict.fromkeys(args.workload or ())]
    if args.shapes:
        workloads.append(read_shapes(args.shapes))
    if workloads:
        return [with_contenders(workload) for workload in workloads], left_out
    plan = [with_contenders(find_workload(name)) for name in DEFAULT_WORKLOADS]
    try:
        for workload, contenders in plan:
            require_memory(workload, contenders, settings)
    except BenchError:
        left_out.clear()
        plan = [with_contenders(find_workload(name)) for name in SMALL_MACHINE_WORKLOADS]
    return plan, left_out


def _run_train(args: argparse.Namespace) -> int:
    device = _prepare_machine(args)
    import torch

    from . import report
    from .environment import describe, fastest_backend, machine_line
    from .pages import plots
    from .timing.train import TrainSettings, run_train, select_optimizers, train_tables

    _check_outputs(args)
    if args.preset and args.model:
        raise BenchError("--preset loops fixes the models; leave out --model")
    names = LOOP_MODELS if args.preset == "loops" else args.model or ("transformer++-70m",)
    names = list(dict.fromkeys(names))
    environment = describe(device)
    contenders = select_optimizers(args.optimizers, fastest_backend(device, torch.float32))
    autocast = device.type == "cuda" if args.autocast is None else args.autocast
    settings = TrainSettings(
        device, args.seconds, args.batch, args.context, args.clip, autocast, args.text
    )
    print(machine_line(environment))
    with report.progress_bar("training") as progress:
        rows, completed = run_train(names, contenders, settings, progress)
    record = report.record("train", args.command, environment, rows=rows, interrupted=not completed)
    record = report.as_plain(record)
    for table in train_tables(record):
        report.print_table(table)
    if args.json:
        report.write_json(args.json, record)
        _announce(args.json)
    if args.plot and any(row["time"] for row in record["rows"]):
        plots.plot_train(record, args.plot)
        _announce(args.plot)
    return _finish(not completed, record["rows"])


def _run_roofline(args: argparse.Namespace) -> int:
    device = _prepare_machine(args)
    from . import report
    from .environment import describe, machine_line
    from .pages import plots
    from .timing import roofline
    from .timing.workloads import parse_count

    _check_outputs(args)
    dtype = _find_dtype(args.dtype)
    largest = parse_count(args.largest) if args.largest else None
    environment = describe(device)
    print(machine_line(environment))
    with report.progress_bar("measuring") as progress:
        result = roofline.run_roofline(
            device, dtype, args.seconds, largest, progress, args.state, args.rounding
        )
    record = report.as_plain(report.record("roofline", args.command, environment, **result))
    for table in roofline.roofline_tables(record):
        report.print_table(table)
    if args.json:
        report.write_json(args.json, record)
        _announce(args.json)
    if args.plot and record["floors"]:
        plots.plot_roofline(record, args.plot)
        _announce(args.plot)
    return _finish(record["interrupted"])


def _run_ranks(args: argparse.Namespace) -> int:
    import torch

    from . import report
    from .environment import describe, machine_line
    from .pages import plots
    from .timing.projection import project, projection_table
    from .timing.ranks import SIDE, RanksSettings, ranks_table, run_ranks

    _check_outputs(args)
    environment = describe(torch.device("cpu"))
    if args.project:
        if args.ranks or args.tensors or args.seconds or args.threads:
            raise BenchError("--project measures nothing; leave out the options of a measurement")
        record = report.record("projection", args.command, environment, projection=project())
        report.print_table(projection_table(record))
    else:
        if args.plot:
            raise BenchError("--plot draws the projection: add --project, or leave it out")
        settings = RanksSettings(
            args.ranks or (1, 2, 4), args.tensors or 300, args.seconds or 60.0, args.threads or 1
        )
        print(machine_line(environment))
        with report.progress_bar("measuring") as progress:
            rows = run_ranks(settings, progress)
        told = {"tensors": settings.tensors, "side": SIDE, "threads": settings.threads}
        record = report.record("ranks", args.command, environment, rows=rows, **told)
        report.print_table(ranks_table(record))
    if args.json:
        report.write_json(args.json, record)
        _announce(args.json)
    if args.plot:
        plots.plot_projection(record, args.plot)
        _announce(args.plot)
    if any(row["same_bits"] is False for row in record.get("rows", ())):
        print("ngn-bench: ranks differ that should have the same numbers", file=sys.stderr)
        return 1
    return 0


def _run_compare(args: argparse.Namespace) -> int:
    from . import report
    from .timing.compare import compare, comparison_table, environment_changes

    old, new = report.read_json(args.old), report.read_json(args.new)
    comparison = compare(old, new, args.threshold, args.metric)
    report.print_table(comparison_table(comparison, args.metric))
    for line in (*comparison.broken, *comparison.missing):
        print(line)
    changed = environment_changes(old, new)
    for line in changed:
        print(f"the environment differs: {line}")
    if changed and args.metric == "time":
        print("Across machines or versions, --metric ratio is the fairer comparison.")
    slower = len(comparison.slower)
    print(f"{slower or 'none'} of {len(comparison.changes)} rows became slower")
    return 1 if slower or comparison.broken else 0


def _run_info(args: argparse.Namespace) -> int:
    device = _prepare_machine(args)
    from . import report
    from .environment import describe

    report.require_writable(args.json)
    environment = describe(device)
    for line in report.info_lines(environment):
        print(line)
    if args.json:
        report.write_json(args.json, report.record("info", args.command, environment))
        _announce(args.json)
    return 0
