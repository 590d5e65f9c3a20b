"""Tables of `dhelix shard` for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dhelix.launch.shard.view import ShardView
from dhelix.launch.shown.units import time_text
from dhelix.passes.sharding.factors import Factors
from dhelix.passes.sharding.groups import PlannedGroups, held
from dhelix.passes.sharding.planner import Candidate

_GB = 1e9


def headline(view: ShardView) -> str:
    """The first line: the factors, the step, the gain over known strategies, and how much of it is guessed."""
    sizes, times = view.task.job.sizes, view.chosen.times
    gains = ", ".join(_gain(view, name) for name in view.known)
    step = time_text(times.step)
    if view.compiled is not None:
        step = f"{time_text(view.compiled)} by its program and {step} by formulas"
    return (
        f"{sizes.name} on {view.task.mesh} GPUs: {_chosen(view)}. A step takes {step}, "
        f"{time_text(times.exposed)} of it exposed communication; {gains}. {_certainty(view)}"
    )


def _chosen(view: ShardView) -> str:
    if view.groups is None:
        return _said(view.chosen.factors)
    if view.groups.equal:
        return f"{_said(view.chosen.factors)} for all groups"
    return "; ".join(f"{name}: {_said(found.factors)}" for name, found in view.groups.of_group.items())


def _said(factors: Factors) -> str:
    return ", ".join(f"{name} {factor}" for name, factor in factors.states())


def _gain(view: ShardView, name: str) -> str:
    candidate = view.known[name]
    found = view.gain(candidate)
    if found is None:
        return f"{name} does not fit"
    if candidate.factors == view.chosen.factors and (view.groups is None or view.groups.equal):
        return f"this is {name}"
    return f"{found:.2f} x as fast as {name}"


def _certainty(view: ShardView) -> str:
    times = view.chosen.times
    if not times.total:
        return "Nothing is communicated."
    measured = max(1.0 - times.guessed - times.scaled, 0.0)
    parts = {"measured": measured, "scaled from other meshes or sizes": times.scaled, "guessed": times.guessed}
    shares = ", ".join(f"{share:.0%} {name}" for name, share in parts.items() if share >= 5e-3)
    return f"Times of collectives: {shares} (from {view.task.source})."


def print_view(view: ShardView, console: Console, rows: int) -> None:
    """Prints the headline, the parts of memory and time, and the alternatives."""
    console.print(headline(view), style="bold", markup=False)
    for note in view.task.notes:
        console.print(f"- {note}", soft_wrap=True, markup=False)
    if view.groups is not None:
        _print_groups(view.groups, console)
    _print_memory(view, console)
    _print_times(view, console)
    _print_candidates(view, console, rows)
    if view.placed:
        _print_placement(view, console)


def _print_groups(groups: PlannedGroups, console: Console) -> None:
    heads = ("parameters", "gradients", "optimizer", "GB", "seconds in all", "exposed", "update")
    table = _table("Groups of parameters", "", *heads)
    for name, found in groups.of_group.items():
        times = found.times
        seconds = (f"{value:.4f}" for value in (times.total, times.exposed, times.update))
        table.add_row(escape(name), *_texts(found.factors), f"{held(found) / _GB:.2f}", *seconds)
    for name, found in (("together", groups.best), ("one for all", groups.alike.best)):
        times = found.times
        seconds = (f"{value:.4f}" for value in (times.total, times.exposed, times.update))
        factors = _texts(found.factors) if found is groups.alike.best else ("", "", "")
        table.add_row(name, *factors, f"{found.memory.total / _GB:.2f}", *seconds, style="bold")
    table.caption = "GB of a group are its states and what is gathered; together and for all, a GPU's memory"
    console.print(table)
    console.print(f"{groups.gain[0].upper()}{groups.gain[1:]}.", soft_wrap=True, markup=False)


def _texts(factors: Factors) -> tuple[str, ...]:
    return tuple(str(factor) for _, factor in factors.states())


def _print_memory(view: ShardView, console: Console) -> None:
    table = _table("Memory of a GPU", "", "GB")
    for name, size in view.chosen.memory.parts().items():
        if size:
            table.add_row(name, f"{size / _GB:.2f}")
    table.add_row("total", f"{view.chosen.memory.total / _GB:.2f}", style="bold")
    table.add_row("limit", f"{view.planned.limit / _GB:.2f}")
    if view.task.job.rest is not None:
        table.caption = "Activations hold all that the formulas do not know of the compiled step."
    console.print(table)


def _print_times(view: ShardView, console: Console) -> None:
    times = view.chosen.times
    table = _table("Time of a step", "", "seconds in all", "exposed")
    for part in times.parts:
        if part.total:
            table.add_row(part.name, f"{part.total:.4f}", f"{part.exposed:.4f}")
    table.add_row("communication", f"{times.total:.4f}", f"{times.exposed:.4f}", style="bold")
    table.add_row("compute", f"{times.compute:.4f}", f"{times.compute:.4f}")
    table.add_row("update", f"{times.update:.4f}", f"{times.update:.4f}")
    table.add_row("step", "", f"{times.step:.4f}", style="bold")
    if view.task.job.split == "inside":
        table.caption = (
            "Tensors are split inside. So the all-reduce is a reduce-scatter, with an all-reduce between copies, and "
            "the broadcast is an all-gather."
        )
    console.print(table)


def _print_candidates(view: ShardView, console: Console, rows: int) -> None:
    heads = ("", "parameters", "gradients", "optimizer", "GB", "seconds in all", "exposed", "step", "why not")
    table = _table("Other factors" if view.groups is None else "The same factors for all groups", *heads)
    table.columns[-1].justify = "left"
    for name, candidate in _shown(view, rows):
        factors = (str(factor) for _, factor in candidate.factors.states())
        times = candidate.times
        seconds = (f"{value:.4f}" for value in (times.total, times.exposed, times.step))
        reason = "" if candidate == view.chosen else view.why(candidate)
        bold = "bold" if candidate == view.chosen else ""
        table.add_row(name, *factors, f"{candidate.memory.total / _GB:.1f}", *seconds, reason, style=bold)
    fit, left = len(view.planned.candidates), len(view.planned.rejected)
    table.caption = f"{fit} of {fit + left} factors fit; factors are GPUs of a node x nodes"
    console.print(table)


def _shown(view: ShardView, rows: int) -> Iterator[tuple[str, Candidate]]:
    if view.groups is None or view.groups.equal:  # else no one triple of factors says what is shown
        yield "shown", view.chosen
    yield from view.known.items()
    named = {candidate.factors for candidate in view.known.values()}
    for candidate in [each for each in view.others if each.factors not in named][:rows]:
        yield "", candidate


def _print_placement(view: ShardView, console: Console) -> None:
    assert view.placed
    placed, lines = view.placed, list[str]()
    if placed.order:
        lines.append(f"Order of nodes: {', '.join(placed.order)}")
    for size, before, after in placed.shares:
        lines.append(
            f"Groups of {size} nodes under several leaf switches: {after:.0%}; in the file's order {before:.0%}."
        )
    if placed.gpu_order:
        lines.append(f"Order of GPUs in each node: {', '.join(map(str, placed.gpu_order))}")
    for one in placed.traffic:
        before = f"in the order of the file {one.listed / _GB:.3g} GB"
        lines.append(f"A step sends {one.placed / _GB:.3g} GB {one.links}; {before}.")
    for line in (*lines, *placed.notes):
        console.print(line, soft_wrap=True, markup=False)


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for head in others:
        table.add_column(head, justify="right")
    return table
