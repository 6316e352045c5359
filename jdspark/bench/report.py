"""Tables, JSON and a chart of what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .parts import Row

TITLES = {
    "bookkeeping": "bookkeeping of a step, from the accepted tokens to the block's write, products ready-made",
    "bookkeeping and acceptance": "bookkeeping with acceptance ahead of it and the next tokens behind it",
    "torch.compile": "the eager chain under torch.compile, and its peers again",
    "step": "whole step",
    "part": "parts of the step",
}

COLUMNS: dict[str, Callable[[Row], str]] = {
    "device us": lambda row: number(row.figures.device_us),
    "clock": lambda row: row.figures.device_clock,
    "alone us": lambda row: number(row.figures.alone_us),
    "kernels us": lambda row: number(row.figures.kernel_us),
    "launches": lambda row: number(row.figures.launches),
    "graphs": lambda row: number(row.figures.graph_launches, 2),
    "loose": lambda row: number(row.figures.loose_launches),
    "wall us": lambda row: number(row.figures.wall_us),
    "dispatch us": lambda row: number(row.figures.dispatch_us),
    "MB": lambda row: "" if row.bytes is None else f"{row.bytes / 1e6:.2f}",
    "floor us": lambda row: number(row.floor_us),
    "ratio": lambda row: ratio(row),
}


def number(value: float | None, digits: int = 1) -> str:
    """A figure for a table, empty if there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def ratio(row: Row) -> str:
    """Device time over the floor; a dash where the floor is next to nothing."""
    measured = row.floor_us is not None and row.figures.device_us is not None
    return "-" if measured and row.ratio is None else number(row.ratio, 2)


def line(row: Row) -> str:
    """One row as it comes, for somebody who waits."""
    size = f"{row.part}: B={row.B} context={row.context} {row.name}"
    if row.figures.error:
        return f"{size}: {row.figures.error}"
    return (
        f"{size}: "
        + ", ".join(f"{name} {value}" for name, value in shown(row).items())
        + (f"; built in {row.figures.build_s:.1f} s" if row.figures.build_s is not None else "")
        + (f"; at {row.at_s:.1f} s" if row.at_s is not None else "")
        + (f" ({row.figures.note})" if row.figures.note else "")
    )


def shown(row: Row) -> dict[str, str]:
    """The figures of a row that are there."""
    return {name: value for name, of in COLUMNS.items() if (value := of(row))}


def print_tables(rows: Sequence[Row], machine: dict[str, Any]) -> None:
    """One table per part, then what was left out and why."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 150)
    for part in dict.fromkeys(row.part for row in rows):
        measured = [row for row in rows if row.part == part and not row.figures.error and not row.left_out]
        names = [name for name, of in COLUMNS.items() if any(of(row) for row in measured)]
        if not measured:
            continue
        table = Table("B", "context", "variant", title=TITLES.get(part, part))
        for name in names:
            table.add_column(name, justify="right")
        for row in measured:
            table.add_row(str(row.B), str(row.context), row.name, *(COLUMNS[name](row) for name in names))
        console.print(table)
    for row in rows:
        if row.figures.error or row.figures.note:
            cells = f"B={row.B} context={row.context} " if row.B else ""
            console.print(f"{row.part}: {cells}{row.name}: {row.figures.error or row.figures.note}", markup=False)
    for reason in dict.fromkeys(row.left_out for row in rows if row.left_out):
        of_reason = dict.fromkeys(f"{row.part}: {row.name}" for row in rows if row.left_out == reason)
        console.print(f"not measured, {reason}: {'; '.join(of_reason)}", markup=False)
    console.print(machine["what"], style="bold", markup=False)


def write_json(path: Path, rows: Sequence[Row], machine: dict[str, Any]) -> None:
    """Everything that was measured so far; the file is whole at any moment."""
    unfinished = path.with_name(path.name + ".new")
    content = {"machine": machine, "unit": "us per decode step, medians", "rows": [row.to_json() for row in rows]}
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def step_time(row: Row) -> float | None:
    """What the chart shows: device time, or host time where there is no device."""
    return row.figures.device_us if row.figures.device_us is not None else row.figures.wall_us


NEAR_THE_FLOOR = 3.0
"""Times the floor. Variants further from it are in the chart's upper half only: below they would press the others together."""


def plot(path: Path, rows: Sequence[Row], machine: dict[str, Any]) -> None:
    """Write `chart` to a file."""
    chart(rows, machine).savefig(path, dpi=120)


def chart(rows: Sequence[Row], machine: dict[str, Any]) -> Any:
    """The whole step's time against context (B = 1) and against B (shortest context), with the floor: a matplotlib figure.

    Above all variants, by factors; below those near the floor, on a linear axis, where a constant cost of each token or request
    is a straight line. A variant with a single point among lines is in the tables only.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

    timed = [(row, time) for row in rows if row.part == "step" and (time := step_time(row)) is not None]
    colors = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row.name for row, _ in timed))}
    shortest = min((row.context for row, _ in timed), default=0)
    figure = Figure(figsize=(11, 7), layout="constrained")
    sides: tuple[tuple[str, str, Callable[[Row], int], list[tuple[Row, float]]], ...] = (
        ("context tokens", "B = 1", lambda row: row.context, [found for found in timed if found[0].B == 1]),
        ("B", f"context {shortest}", lambda row: row.B, [found for found in timed if found[0].context == shortest]),
    )
    for column, (label, title, x, of_side) in zip(figure.subplots(2, 2).T, sides, strict=True):
        along = sorted(of_side, key=lambda found: x(found[0]))
        floor = {x(row): row.floor_us for row, _ in along if row.floor_us is not None and machine["on_gpu"]}
        lines = {name: {x(row): time for row, time in along if row.name == name} for name in colors}
        most = max(map(len, lines.values()), default=0)
        lines = {name: points for name, points in lines.items() if len(points) > 1 or len(points) == most}
        near = {
            name: points
            for name, points in lines.items()
            if all(time <= NEAR_THE_FLOOR * floor.get(at, math.inf) for at, time in points.items())
        }
        for axes, shown, scale in zip(column, (lines, near), ("log", "linear"), strict=True):
            for name, points in shown.items():
                axes.plot(*zip(*points.items()), marker="o", label=name, color=colors[name])
            if floor:
                axes.plot(*zip(*floor.items()), color="black", linestyle="--", marker="_", label="floor")
            axes.set(xlabel=label, ylabel="us per step", yscale=scale)
            axes.xaxis.set_major_locator(
                MaxNLocator(6, integer=True) if most > 1 else FixedLocator([x(row) for row, _ in along])
            )
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.yaxis.set_major_formatter(ScalarFormatter())
        column[0].set(title=title)
        column[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        column[0].yaxis.set_minor_formatter(NullFormatter())
        column[1].set(ylim=(0, None))
    handles = {name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(machine["what"], fontsize="small")
    return figure
