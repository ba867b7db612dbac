"""The lab's subcommands of `ngn-bench`: `toy`, `sweep`, `ablate` and `summary`."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ngn_kernels.formats import ROUNDINGS

from ..environment import select_device
from ..errors import BenchError, unknown_name
from ..report import Table, markdown_table, print_table
from .paper import BETAS

DEFAULT_OPTIMIZERS = "ngn-m,sgdm,momo,ngn-mdv1,adam,momo-adam"
STORING_OPTIMIZERS = "ngn-m,ngn-mdv1"
PLAIN = {"state": "float32", "rounding": "nearest", "dtype": "float32"}
"""What the options of storage are where nobody asked: such runs do not mention them."""


def add_subcommands(subparsers: Any) -> None:
    """Add the lab's subcommands to the parser of `ngn-bench`. Each sets `func`."""
    _add_toy(subparsers)
    _add_sweep(subparsers)
    _add_ablate(subparsers)
    _add_summary(subparsers)


def _add_toy(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "toy",
        help="the paper's toy problems, with their figures",
        description="Run one of the paper's toy problems: print its table, draw its figure.",
    )
    parser.add_argument(
        "name", help="diabetes, rosenbrock, x2x4, many-minima, quadratic, or all of them: all"
    )
    _add_places(parser)
    parser.set_defaults(func=run_toy)


def _add_places(parser: Any) -> None:
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("NGN_DATA_DIR", "data")),
        metavar="DIR",
        help="folder with the data sets (default: $NGN_DATA_DIR, or ./data)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder for records and pictures (default: ngn-lab/NAME)",
    )


def _add_running(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--task", default="digits-mlp", help="a task's name, or your own as file.py:function"
    )
    what.add_argument(
        "--seeds", default="3", metavar="N", help="how many (3), or which: 0,4,7; default: 3"
    )
    what.add_argument(
        "--scale",
        default="1",
        metavar="S",
        help="cut the paper's sizes down: 0.1, or some of steps=,model=,batch=,context=",
    )
    what.add_argument(
        "--steps", type=int, metavar="N", help="train so many steps, not as many as the task says"
    )
    model = parser.add_argument_group("lm-transformer++")
    model.add_argument("--size", help="70m, 160m, 410m, 1b, or dim=256,heads=4,layers=4")
    model.add_argument("--text", metavar="PATH", help="a text file, or a folder of .bin tokens")
    model.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json; default: bytes")
    how = parser.add_argument_group("how to run it")
    how.add_argument("--device", default="cpu", help="cpu, cuda or auto (default: cpu)")
    how.add_argument("--processes", type=int, metavar="N", help="runs at once (default: all cores)")
    how.add_argument("--threads", type=int, default=1, metavar="N", help="threads per run (1)")
    how.add_argument("--micro-batch", type=int, metavar="N", help="split batches into such pieces")
    how.add_argument(
        "--loader-workers", type=int, default=0, metavar="N", help="ImageNet-1k: JPEG readers (0)"
    )
    how.add_argument(
        "--report-only", action="store_true", help="draw what the record has, train nothing"
    )
    how.add_argument("--html", action="store_true", help="also write report.html, one file")
    _add_places(how)


def _add_sweep(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sweep",
        help="train at many step sizes: how wide is the good range?",
        description=(
            "Train a task with several optimizers at many step sizes and draw the step-size "
            "resilience curve. Finished runs are kept in DIR/runs.jsonl: the same command goes on "
            "where it was stopped. Without arguments: digits-mlp, which needs no data, in about "
            "two minutes on 2 cores."
        ),
    )
    parser.add_argument(
        "--optimizers",
        metavar="NAMES",
        help=f"default: {DEFAULT_OPTIMIZERS}",
    )
    parser.add_argument(
        "--lr",
        metavar="LRS",
        help="1e-3,1e-2 or 1e-3:1e2 (powers of ten) or 1e-3:1e2:3 (three per decade); "
        "default: eight powers of ten that suit the optimizer",
    )
    parser.add_argument(
        "--margin",
        type=float,
        metavar="M",
        help="what counts as good: points of accuracy (0.5) or per cent of perplexity (5)",
    )
    parser.add_argument(
        "--loss-floor",
        metavar="F",
        help="tell the optimizers that the loss never falls below F; known: what the task says. "
        "Then the default is those of the optimizers that take one",
    )
    parser.add_argument(
        "--state",
        default="float32",
        help="how NGN optimizers store m and v: float32, bfloat16, 8bit, or both: 8bit+bfloat16. "
        f"Then the default is {STORING_OPTIMIZERS}",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "mixed", "bfloat16"),
        default="float32",
        help="mixed: compute in bfloat16; bfloat16: parameters as well (default: as the task says)",
    )
    parser.add_argument(
        "--rounding",
        choices=ROUNDINGS,
        default="nearest",
        help="how NGN optimizers store parameters of bfloat16",
    )
    parser.add_argument(
        "--list", action="store_true", help="list tasks and optimizers, and what is not installed"
    )
    _add_running(parser)
    parser.set_defaults(func=run_sweep)


def _add_ablate(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "ablate",
        help="the paper's ablations of betas and weight decay",
        description=(
            "The paper's ablations on a task of choice, over lr 3e-4 … 3e-2: betas for Adam and "
            "NGN-MDv1, weight decay for AdamW, Momo-Adam, Dec-NGN-MDv1 and NGN-MDv1W."
        ),
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--betas", action="store_true", help="β₁ at β₂ = 0.95, and β₂ at β₁ = 0.9")
    what.add_argument("--weight-decay", action="store_true", help="λ")
    parser.add_argument("--optimizers", metavar="NAMES", help="others than the paper's")
    for option, values, text in (
        ("--lr", "3e-4,1e-3,3e-3,1e-2,3e-2", "step sizes"),
        ("--beta1", ",".join(map(str, BETAS["β₁"])), "values of β₁"),
        ("--beta2", ",".join(map(str, BETAS["β₂"])), "values of β₂"),
        ("--decay", "0,1e-3,1e-2,1e-1", "values of λ"),
    ):
        parser.add_argument(
            option, default=values, metavar="LIST", help=f"{text} (default: {values})"
        )
    _add_running(parser)
    parser.set_defaults(func=run_ablate)


def _add_summary(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "summary",
        help="one table and one picture over all sweeps whose records are kept",
        description=(
            "Print the table over all sweeps that ROOT/bench/results/lab keeps, and which of their "
            "runs are missing. Trains nothing."
        ),
    )
    parser.add_argument(
        "--root", type=Path, default=Path(), help="folder of the repository (default: this one)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        action="append",
        default=[],
        help="first add the runs of a sweep that wrote into DIR",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--write",
        action="store_true",
        help="bring docs/stability.md, docs/precision.md and the pictures up to date",
    )
    what.add_argument(
        "--check",
        action="store_true",
        help="exit 1 if one of these pages is out of date",
    )
    parser.set_defaults(func=run_summary)


def numbers(text: str, option: str) -> list[float]:
    """`1,2,3` as numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise BenchError(
            f"{option} takes numbers with commas between them, not {text!r}"
        ) from error


def step_sizes(text: str) -> list[float]:
    """`a,b,c`, or `low:high` in powers of ten, or `low:high:n` with n values per decade."""
    if ":" not in text:
        values = numbers(text, "--lr")
    else:
        low, high, per_decade, *rest = [*numbers(text.replace(":", ","), "--lr"), 1.0]
        counted = per_decade >= 1 and per_decade.is_integer()
        if rest[1:] or not 0 < low < high < math.inf or not counted:
            raise BenchError(f"--lr takes low:high or low:high:per-decade, not {text!r}")
        count = round(math.log10(high / low) * per_decade)
        exact = [low * 10 ** (k / per_decade) for k in range(count + 1)]
        rounded = [float(f"{value:.3g}") for value in exact]
        values = [r for r, e in zip(rounded, exact, strict=True) if min(r, e) <= high]
    if not all(0 < value < math.inf for value in values):
        raise BenchError(f"step sizes are positive numbers, not {text!r}")
    return sorted(set(values))


def seeds(text: str) -> list[int]:
    """`3` for the seeds 0, 1, 2, or `0,4,7` for these."""
    given = numbers(text, "--seeds")
    if given == [0] or not all(value.is_integer() and value >= 0 for value in given):
        raise BenchError(f"--seeds takes a number of seeds, or seeds, not {text!r}")
    values = [int(value) for value in given]
    return list(range(values[0])) if len(values) == 1 else values


def selected(text: str) -> tuple[list[str], list[str]]:
    """The installed optimizers among those named, and a line for each that is not."""
    from . import optimizers

    names, missing = [], []
    for part in text.split(","):
        entry = optimizers.find(part.strip())
        if entry.installed():
            names.append(entry.name)
        else:
            missing.append(f"{entry.label} is left out: {entry.install_command}")
    if not names:
        raise BenchError("none of these optimizers is installed.\n" + "\n".join(missing))
    return list(dict.fromkeys(names)), missing


def _folder(args: argparse.Namespace, name: str) -> Path:
    safe = "".join(c if c.isalnum() or c in "-+_" else "-" for c in name)
    return args.out if args.out is not None else Path("ngn-lab") / safe


def _machine(args: argparse.Namespace) -> Any:
    from .train import Machine

    return Machine(
        args.data_dir,
        str(select_device(args.device)),
        args.threads,
        args.micro_batch,
        args.loader_workers,
        tuple(args.command),
    )


def _common_spec(args: argparse.Namespace) -> dict[str, Any]:
    from . import optimizers
    from .tasks import Scale, find_task, fingerprint, task_file

    find_task(args.task)
    names = ("size", "text", "tokenizer", "steps", "loss_floor", *PLAIN)
    options = {key: getattr(args, key, None) for key in names}
    given = {
        key: str(value)
        for key, value in options.items()
        if value is not None and value != PLAIN.get(key)
    }
    if "rounding" in given and given.get("dtype") != "bfloat16":
        raise BenchError("--rounding is of bfloat16 parameters: add --dtype bfloat16")
    optimizers.storage(given.get("state"), given.get("rounding"))
    own = [
        task_file(args.task),
        *(Path(given[key]) for key in ("text", "tokenizer") if key in given),
    ]
    return {
        "task": args.task,
        "scale": str(Scale.parse(args.scale)),
        "options": tuple(sorted(given.items())),
        "files": fingerprint([path for path in own if path is not None]),
    }


def _train(args: argparse.Namespace, specs: Sequence[Any], folder: Path) -> list[Any]:
    from .sweep import Record, sweep

    processes = args.processes or os.cpu_count() or 1
    counts = (processes, args.threads, args.micro_batch, args.steps)
    if any(count is not None and count < 1 for count in counts):
        raise BenchError("--processes, --threads, --micro-batch and --steps are at least 1")
    record = Record(folder / "runs.jsonl")
    try:
        return sweep(specs, record, _machine(args), processes)
    except KeyboardInterrupt:
        print(
            f"The finished runs are in {record.path}: the same command goes on from there, "
            "--report-only shows them."
        )
        raise


def run_sweep(args: argparse.Namespace) -> int:
    """`ngn-bench sweep`."""
    from . import figures
    from .results import Results, tables

    if args.list:
        return _list()
    figures.pyplot()
    names, missing = selected(swept(args))
    common = _common_spec(args)
    folder = _folder(args, args.task)
    if args.report_only:
        runs = _recorded(folder, common, lambda s: s["betas"] is None and s["weight_decay"] == 0)
    else:
        runs = _train(args, _grid(args, names, common), folder)
    results = Results(runs)
    margin = args.margin if args.margin is not None else results.default_margin
    shown = tables(results, margin)
    drawn = figures.all_figures(results, margin)
    _publish(folder, args.html, f"Step-size sweep: {results.task}", shown, drawn, runs)
    for line in missing:
        print(line)
    return 0


def swept(args: argparse.Namespace) -> str:
    """The names of the optimizers that a sweep is asked for."""
    from . import optimizers
    from .train import KNOWN_FLOOR

    stored = (args.state, args.rounding) != (PLAIN["state"], PLAIN["rounding"])
    default = STORING_OPTIMIZERS if stored else DEFAULT_OPTIMIZERS
    if args.loss_floor is None:
        return args.optimizers or default
    if args.loss_floor != KNOWN_FLOOR and not math.isfinite(_number(args.loss_floor)):
        raise BenchError(f"--loss-floor takes a number or {KNOWN_FLOOR}, not {args.loss_floor!r}")
    taking = [name for name in default.split(",") if optimizers.find(name).floor]
    return args.optimizers or ",".join(taking)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _grid(args: argparse.Namespace, names: Sequence[str], common: dict[str, Any]) -> list[Any]:
    """Each optimizer at each step size with each seed."""
    from . import optimizers
    from .train import RunSpec

    given = step_sizes(args.lr) if args.lr else None
    return [
        RunSpec(**common, optimizer=name, lr=lr, seed=seed)
        for seed in seeds(args.seeds)
        for name in names
        for lr in given or optimizers.OPTIMIZERS[name].grid
    ]


def _recorded(
    folder: Path, common: dict[str, Any], wanted: Callable[[dict[str, Any]], bool]
) -> list[Any]:
    """The record's runs of this task, scale and files whose spec is wanted."""
    from .sweep import Record
    from .train import RunSpec

    record = Record(folder / "runs.jsonl")
    same = common | {"options": dict(common["options"])}
    runs = []
    for run in record.read():
        spec = RunSpec.from_json(run["spec"]).as_json()
        if wanted(spec) and all(spec[key] == value for key, value in same.items()):
            runs.append(run)
    if not runs:
        raise BenchError(
            f"{record.path} has no runs of this task with this scale, these options and these files"
        )
    return runs


def _publish(
    folder: Path,
    html: bool,
    title: str,
    shown: Sequence[Table],
    drawn: dict[str, Any],
    runs: Sequence[dict[str, Any]],
) -> None:
    """Print tables, write them and the pictures, and say where they are."""
    from . import figures
    from .page import page

    folder.mkdir(parents=True, exist_ok=True)
    for table in shown:
        print_table(table)
    text = "\n".join(f"{t.title}\n\n{markdown_table(t)}\n{t.caption}\n" for t in shown)
    (folder / "tables.md").write_text(text, encoding="utf-8")
    if html:
        path = folder / "report.html"
        path.write_text(page(title, shown, drawn, runs), encoding="utf-8")
        print(f"report:  {path}")
    for name, figure in drawn.items():
        print(f"picture: {figures.save(figure, folder / f'{name}.png')}")
    print(f"tables:  {folder / 'tables.md'}")


def _list() -> int:
    from . import optimizers
    from .tasks import TASKS

    print("Tasks:")
    for name, build in TASKS.items():
        print(f"  {name:<28} {(build.__doc__ or '').splitlines()[0]}")
    print("  your_file.py:function        A task of your own.\n\nOptimizers:")
    for entry in optimizers.OPTIMIZERS.values():
        state = "" if entry.installed() else f"not installed: {entry.install_command}. "
        print(f"  {entry.name:<14} {entry.label:<20} {state}{entry.note}".rstrip())
    return 0


def planned(command: str) -> list[Any]:
    """The runs that a command `ngn-bench sweep …` does."""
    from . import optimizers

    parser = argparse.ArgumentParser(prog="ngn-bench")
    add_subcommands(parser.add_subparsers(required=True))
    args = parser.parse_args(shlex.split(command)[1:])
    names = [optimizers.find(name).name for name in swept(args).split(",")]
    return _grid(args, names, _common_spec(args))


DOCUMENTS = ("docs/stability.md", "docs/precision.md")


def run_summary(args: argparse.Namespace) -> int:
    """`ngn-bench summary`."""
    from ..pages.readme import picture_source
    from . import figures, precision, summary

    folder = args.root / "bench" / "results" / "lab"

    def load() -> tuple[list[Any], list[Any]]:
        """The sweeps of docs/stability.md, and those of docs/precision.md if there are any."""
        narrow = (folder / precision.INDEX).exists()
        return summary.load(folder, planned), (
            summary.load(folder, planned, precision.INDEX) if narrow else []
        )

    for source in args.keep:
        kept, narrow = load()
        added = summary.keep(source / "runs.jsonl", [*kept, *narrow])
        print(f"{added} runs of {source} are kept now")
    kept, narrow = load()
    print_table(summary.summary_table(kept))
    for sweep in [*kept, *narrow]:
        if sweep.missing:
            print(f"{sweep.title}: {sweep.missing_text()}\n  " + "\n  ".join(sweep.commands))
    stale = []
    images = args.root / "docs" / "images"
    parts = summary.sections(kept) | precision.sections(narrow, args.root)
    for path in (args.root / name for name in DOCUMENTS):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        wanted = summary.replaced(text, parts, path)
        if wanted != text:
            stale.append(path)
            if args.write:
                path.write_text(wanted, encoding="utf-8")
                print(f"wrote {path}")
    if args.write:
        drawn = {"stability-summary.png": summary.summary_figure(kept)}
        for sweep in kept:
            drawn |= summary.pictures(sweep)
        if narrow:
            drawn["precision.png"] = precision.figure(narrow)
        for name, figure in drawn.items():
            print(f"picture: {figures.save(figure, images / name)}")
    headline, source = images / summary.HEADLINE_PICTURE, summary.headline_source(kept)
    if source is not None and picture_source(headline) != source:
        stale.append(headline)
        if args.write:
            figure = summary.headline_figure(kept)
            print(f"picture: {figures.save(figure, headline, source)}")
    if args.check and stale:
        names = " and ".join(str(path) for path in stale)
        print(f"{names} do not match the kept records: run ngn-bench summary --write")
        return 1
    return 0


def run_ablate(args: argparse.Namespace) -> int:
    """`ngn-bench ablate`."""
    from . import ablate, figures
    from .train import RunSpec

    figures.pyplot()
    default = ablate.BETA_OPTIMIZERS if args.betas else ablate.DECAY_OPTIMIZERS
    names, missing = selected(args.optimizers or default)
    common = _common_spec(args)
    lrs, chosen_seeds = step_sizes(args.lr), seeds(args.seeds)
    if args.betas:
        pairs = ablate.beta_pairs(numbers(args.beta1, "--beta1"), numbers(args.beta2, "--beta2"))
        variants: list[dict[str, Any]] = [{"betas": pair} for pair in pairs]
    else:
        variants = [{"weight_decay": decay} for decay in numbers(args.decay, "--decay")]
    specs = [
        RunSpec(**common, optimizer=name, lr=lr, seed=seed, **variant)
        for seed in chosen_seeds
        for variant in variants
        for name in names
        for lr in lrs
    ]
    folder = _folder(args, f"{args.task}-{'betas' if args.betas else 'weight-decay'}")
    if args.report_only:
        key = "betas" if args.betas else "weight_decay"
        values = [variant[key] for variant in variants]
        runs = _recorded(folder, common, lambda spec: spec[key] in values)
    else:
        runs = _train(args, specs, folder)
    shown, drawn = (ablate.betas if args.betas else ablate.weight_decay)(runs)
    _publish(folder, args.html, f"Ablation: {args.task}", shown, drawn, runs)
    for line in missing:
        print(line)
    return 0


def run_toy(args: argparse.Namespace) -> int:
    """`ngn-bench toy`."""
    from . import figures
    from .toys import TOYS

    figures.pyplot()
    if args.name != "all" and args.name not in TOYS:
        raise unknown_name("toy", args.name, [*TOYS, "all"])
    for name in TOYS if args.name == "all" else [args.name]:
        toy = TOYS[name](args.data_dir)
        print(toy.note)
        folder = _folder(args, f"toy-{name}")
        for table in toy.tables:
            print_table(table)
        for file, figure in toy.figures.items():
            print(f"picture: {figures.save(figure, folder / f'{file}.png')}")
    return 0
