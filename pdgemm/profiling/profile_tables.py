"""A profile as tables: the time by phase, with the meaning of each phase, the time by rank, and the transfers."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np

from pdgemm.profiling.profile import AGREE, OUTSIDE, PHASES, Profile
from pdgemm.support.tables import Table
from pdgemm.support.text import counted, in_bytes, sides

SHOWN = 16  # the number of ranks up to which each has a line
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
    """Return the profile as text: a table of shares, one of ranks, one of transfers, and figures of all ranks."""
    parts = [_shares(profile), _ranks(profile), _transfers(profile)]
    return "\n\n".join([*(str(x) for x in parts if x.rows), "\n".join(_figures(profile))])


def _shares(profile: Profile) -> Table:
    rows = [
        (name, f"{seconds:.4f}", f"{seconds / profile.mean_seconds:.0%}", MEANING[name])
        for name, seconds in profile.parts.items()
        if profile.mean_seconds
    ]
    title = "where the time of products went, mean of all ranks"
    return Table(("phase", "seconds", "share", "what it is"), rows, words=("phase", "what it is"), title=title)


def _ranks(profile: Profile) -> Table:
    outside = [name for name in OUTSIDE if any(x.outside[name] for x in profile.ranks)]
    columns = ("total", *PHASES, "redistribute", "other", *outside)
    seconds = np.array([[x.seconds, *x.parts.values(), *(x.outside[name] for name in outside)] for x in profile.ranks])
    critical, overlaps = profile.critical.number, [_percent(x.overlap) for x in profile.ranks]
    shown = [x.number for x in profile.ranks] if len(profile.ranks) <= SHOWN else [critical]
    mark = " (critical)" * (len(profile.ranks) > 1)
    rows = [(f"{x}{mark * (x == critical)}", seconds[x], overlaps[x]) for x in shown]
    rows += [
        ("least", seconds.min(0), ""),
        ("mean", seconds.mean(0), _percent(profile.overlap)),
        ("most", seconds.max(0), ""),
    ]
    cells = [(name, *(f"{x:.4f}" for x in figures), overlap) for name, figures, overlap in rows]
    return Table(("rank", *columns, "overlap"), cells, title="seconds of each rank")


def _transfers(profile: Profile) -> Table:
    columns = [
        "kind", "count", "bytes", "p50 ms", "p95 ms", "p99 ms", "waited for", "GB/s of these", "calibrated: in a node",
        "between nodes",
    ]  # fmt: skip
    rows = [
        (
            x["kind"], str(x["count"]), in_bytes(x["bytes"]),
            *(f"{1e3 * x[f'p{q}_seconds']:.3f}" for q in (50, 95, 99)), str(x["waited_for"]),
            *(_rate(x[name]) for name in ("gb_per_second", "calibrated_inside_a_node", "calibrated_between_nodes")),
        )
        for x in profile.transfers()
    ]  # fmt: skip
    return Table(columns, rows, words=("kind",), title="transfers of all ranks")


def _figures(profile: Profile) -> Iterator[str]:
    """Yield what the tables do not show."""
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
    yield f"machine: {name}; clocks of nodes agree to {max(x.clock_error_us for x in profile.about):.1f} us"
    if len(profile.networks) > 1:
        slowest, *others = sorted(profile.networks.items(), key=lambda x: x[1])
        typical = median(rate for _, rate in others)
        yield (
            f"network: {slowest[0]} is the slowest node, {slowest[1] / 1e6:.3g} MB/s each way; the others reach "
            f"{typical / 1e6:.3g} MB/s (median)"
        )
    yield from (f"more threads than cores: {host}" for host in profile.oversubscribed)
    odd = [str(x.number) for x in profile.ranks if not x.agrees]
    if odd:
        yield f"spans and reports differ by more than {AGREE:.0%} on ranks {', '.join(odd)}"


def _rate(gigabytes: float | None) -> str:
    return "-" if gigabytes is None else f"{gigabytes:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
