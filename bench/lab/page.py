"""A sweep's tables and pictures as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..report import Table
from .train import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = {
    "resilience": (
        "The step-size resilience curve",
        "Final score and training loss against the step size; the band spans the seeds. The wider "
        "the flat top, the less the step size matters.",
    ),
    "curves": ("Training at the best step size", "Mean and span over the seeds."),
    "step-sizes": (
        "Effective step size over time",
        "What γ (NGN) or τ (Momo) the method chose, one line per step-size hyper-parameter.",
    ),
    "layer-step-sizes": (
        "Step size per coordinate",
        "Median of γ/D over the coordinates of a layer: what a gradient entry is multiplied by.",
    ),
    "updates": ("Size of the updates", "Norm of the change of a layer in one step."),
    "betas": ("Betas", "Final score for each step size and β; green is better."),
    "weight-decay": ("Weight decay", "Final score against the step size, one panel per λ."),
}

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fafafa; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 2rem 1.2rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p.note { color: #555; margin: .2rem 0 .8rem; max-width: 75ch; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; background: #fff; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .5rem; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th { text-align: right; font-weight: 600; border-bottom: 2px solid #bbb; font-size: .85rem; }
td { text-align: right; } th.text, td.text { text-align: left; }
tr.ours td { background: #fdf3f2; } td.headline { font-weight: 700; }
figure { margin: .4rem 0 0; background: #fff; border: 1px solid #e4e4e4; padding: .6rem; }
figure img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; }
dt { color: #666; } dd { margin: 0; overflow-wrap: anywhere; }
"""


def page(
    title: str, tables: Sequence[Table], figures: dict[str, Figure], runs: Sequence[Run]
) -> str:
    """The whole page; pictures are inside it as vector graphics."""
    parts = [f"<h1>{html.escape(title)}</h1>", _lead(runs), _table(tables[0])]
    for name, figure in figures.items():
        heading, note = CAPTIONS.get(name, (name, ""))
        parts.append(f"<h2>{html.escape(heading)}</h2><p class='note'>{html.escape(note)}</p>")
        parts.append(f"<figure>{_image(figure, heading)}</figure>")
    parts += [_table(table) for table in tables[1:]]
    parts.append(_provenance(runs))
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _lead(runs: Sequence[Run]) -> str:
    diverged = sum(run["status"] == "diverged" for run in runs)
    seeds = {run["spec"]["seed"] for run in runs}
    seconds = sum(run["seconds"] for run in runs)
    duration = f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    text = (
        f"{len(runs)} runs over {len(seeds)} seed(s), {diverged} of which diverged; "
        f"{runs[0]['steps']} steps each, {runs[0]['parameters']:,} parameters, "
        f"{duration} of training in all."
    )
    return f"<p class='note'>{html.escape(text)}</p>"


def _table(table: Table) -> str:
    def cell(tag: str, index: int, text: str) -> str:
        column = table.columns[index]
        kind = "text" if not column.right else "headline" if column.heading == "decades" else ""
        return f"<{tag} class='{kind}'>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", i, column.heading) for i, column in enumerate(table.columns))
    body = "".join(
        f"<tr class='{'ours' if 'NGN' in row[0] else ''}'>"
        + "".join(cell("td", i, text) for i, text in enumerate(row))
        + "</tr>"
        for row in table.rows
    )
    caption = f"<p class='note'>{html.escape(table.caption)}</p>" if table.caption else ""
    return (
        f"<h2>{html.escape(table.title)}</h2><div class='scroll'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{caption}"
    )


def _image(figure: Figure, text: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", facecolor="white")
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='{html.escape(text)}' src='data:image/svg+xml;base64,{encoded}'>"


def _provenance(runs: Sequence[Run]) -> str:
    """Where the numbers come from: each distinct value over all runs."""
    facts: dict[str, list[str]] = {}
    for run in runs:
        env = run["environment"]
        packages = ", ".join(f"{name} {v}" for name, v in env["packages"].items() if v)
        values = {
            "command": shlex.join(run.get("command", [])),
            "scale": run["spec"]["scale"],
            "device": env["device"],
            "processor": f"{env['cpu']}, {env['threads']} thread(s) per run",
            "system": f"{env['platform']}, Python {env['python']}",
            "packages": packages,
        }
        for key, value in values.items():
            if value and value not in facts.setdefault(key, []):
                facts[key].append(value)
    first, last = (pick(run["finished_at"] for run in runs) for pick in (min, max))
    facts["finished"] = [first if first == last else f"{first} to {last}"]
    rows = "".join(
        f"<dt>{html.escape(key)}</dt><dd>{'<br>'.join(map(html.escape, values))}</dd>"
        for key, values in facts.items()
    )
    return f"<h2>How it was made</h2><dl>{rows}</dl>"
