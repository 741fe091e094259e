"""A profile as tables: the time by phase, with the meaning of each phase, the time by rank, and the transfers."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from textwrap import wrap

import numpy as np

from pdgemm.planning.search.candidate_table import WIDTH, wrapped
from pdgemm.support.text import Table, counted, in_bytes, in_seconds, sides
from pdgemm.tools.profiling.profile import OUTSIDE, PHASES, Profile

_UNITS = ((1, "seconds"), (1e3, "milliseconds"), (1e6, "microseconds"))
SHOWN = 16  # the number of ranks up to which each rank has a line
MEANING = {
    "plan": "checks, planning, new memory; `plan(...).prepare()` does this once for products of the same matrices",
    "product": "local products and sums; wide panels (--panel-width) and large local parts multiply fastest",
    "wait": "data has not arrived; depends on --lookahead, --mover, --algorithm and the number of ranks",
    "sync": "the other ranks of the node are not there yet; depends on load balance and on threads per core",
    "pack": "panels are copied into one piece; large blocks of the layout need fewer copies",
    "post": "messages are started; wide panels need fewer",
    "redistribute": "matrices are moved to the layout of the algorithm; summa takes any layout",
    "other": "Python between the steps; wide panels make fewer steps",
}


def tables(profile: Profile) -> str:
    """Return the profile as text of at most 80 columns: tables of shares, of ranks, of transfers, and figures."""
    return "\n\n".join([*map(str, tables_of(profile, WIDTH)), wrapped("\n".join(figures(profile)))])


def tables_of(profile: Profile, width: int = 1 << 16) -> list[Table]:
    """Return the tables that have any rows.   width : columns of a line; longer sentences are wrapped."""
    return [x for x in (_shares(profile, width), *_ranks(profile), *_transfers(profile)) if x.rows]


def _shares(profile: Profile, width: int) -> Table:
    columns, rows = ("phase", "time", "share", "what it is"), []
    for name, seconds in profile.parts.items() if profile.mean_seconds else ():
        first, *others = wrap(MEANING[name], width - 30, break_on_hyphens=False)
        rows.append((name, in_seconds(seconds), f"{seconds / profile.mean_seconds:.0%}", first))
        rows += [("", "", "", line) for line in others]
    title = "Where the time of products went (mean of all ranks)"
    return Table(columns, rows, words=("phase", "what it is"), title=title)


def _ranks(profile: Profile) -> Iterator[Table]:
    """Yield tables of each rank's time in products by phase, and outside products; phases without time are left out."""
    outside = [name for name in OUTSIDE if any(x.outside[name] for x in profile.ranks)]
    critical = profile.critical.number
    shown = [x.number for x in profile.ranks] if len(profile.ranks) <= SHOWN else [critical]
    several = len(profile.ranks) > 1
    note = f"; rank {critical} is the bottleneck" if several else ""
    inside = np.array([[x.seconds, *x.parts.values()] for x in profile.ranks])
    names = ["total", *PHASES, "moves", "other"]
    kept = [x for x, name in enumerate(names) if inside[:, x].any() or name in ("total", "product", "wait")]
    overlaps = {x: _percent(profile.ranks[x].overlap) for x in shown} | {"mean": _percent(profile.overlap)}
    yield _of_ranks("each rank", [names[x] for x in kept], inside[:, kept], shown, note, overlaps)
    if outside:
        seconds = np.array([[x.outside[name] for name in outside] for x in profile.ranks])
        yield _of_ranks("each rank outside of products", outside, seconds, shown, "", {})


def _of_ranks(
    what: str, names: list[str], seconds: np.ndarray, shown: list[int], note: str, overlaps: dict[int | str, str]
) -> Table:
    """Return a table of seconds, scaled to one unit: a line for each rank in `shown`, and for least, mean and most.

    overlaps : the last column, by rank or name of the line; empty: the table has no such column.
    """
    scale, unit = next(x for x in _UNITS if seconds.max(initial=0) * x[0] >= 1 or x is _UNITS[-1])
    lines: list[tuple[int | str, np.ndarray]] = [(x, seconds[x]) for x in shown]
    lines += [("least", seconds.min(0)), ("mean", seconds.mean(0)), ("most", seconds.max(0))]
    last = ("overlap",) * bool(overlaps)
    rows = [
        (str(name), *(_three_digits(scale * x) for x in row), *[overlaps.get(name, "")] * bool(overlaps))
        for name, row in lines
    ]
    return Table(("rank", *names, *last), rows, title=f"{unit.capitalize()} of {what}{note}")


def _three_digits(number: float) -> str:
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 else 2 if number >= 0.9995 else 3
    return f"{number:.{digits}f}" if number else "0"


def _transfers(profile: Profile) -> Iterator[Table]:
    """Yield a table of the seconds of transfers, and a table of their rates, measured and calibrated.

    A rate is measured only from transfers for which a rank waited.
    """
    every = profile.transfers()
    columns = ("kind", "count", "bytes", "p50", "p95", "p99", "waited for", "GB/s")
    rows = [
        (
            x["kind"], str(x["count"]), in_bytes(x["bytes"]),
            *(in_seconds(x[f"p{q}_seconds"]) for q in (50, 95, 99)), str(x["waited_for"]), _rate(x["gb_per_second"]),
        )
        for x in every
    ]  # fmt: skip
    title = "Transfers of all ranks; GB/s of those that were waited for"
    yield Table(columns, rows, words=("kind",), title=title)
    keys = ("gb_per_second", "calibrated_inside_a_node", "calibrated_between_nodes")
    rates = [(x["kind"], *(_rate(x[key]) for key in keys)) for x in every if x[keys[1]] or x[keys[2]]]
    named = ("kind", "measured", "calibrated in a node", "between nodes")
    yield Table(named, rates, words=("kind",), title="GB/s of transfers, measured and calibrated")


def figures(profile: Profile) -> Iterator[str]:
    """Yield the facts that the tables do not show, as lines of text."""
    report = profile.longest
    if report is None:
        yield "no product was traced"
    else:
        yield (
            f"longest product: {report.algorithm} on {sides(*report.grid, report.layers)}, "
            f"{counted(report.panels, 'panel')}, lookahead {report.lookahead}, {report.counted.words_received} words "
            f"received, lower bound {report.lower_bound_words:.0f}"
        )
        yield (
            f"load imbalance {profile.imbalance:.2f} (longest over mean time of products); rank "
            f"{profile.critical.number} waits least"
        )
    if profile.rate is not None:
        yield f"products at {profile.rate:.0%} of the calibrated rate of such products"
    name = profile.machine.name if profile.calibrated else "not calibrated when it was traced (--machine FILE)"
    clocks = f"; clocks of nodes agree to {max(x.clock_error_us for x in profile.about):.1f} us"
    yield f"machine: {name}{clocks * (len({x.node for x in profile.about}) > 1)}"
    if len(profile.networks) > 1:
        slowest, *others = sorted(profile.networks.items(), key=lambda x: x[1])
        typical = median(rate for _, rate in others)
        yield (
            f"network: {slowest[0]} is the slowest node, {slowest[1] / 1e6:.3g} MB/s each way; the others reach "
            f"{typical / 1e6:.3g} MB/s (median)"
        )
    yield from (f"more threads than cores: {host}" for host in profile.oversubscribed)


def _rate(gigabytes: float | None) -> str:
    return "-" if gigabytes is None else f"{gigabytes:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
