"""What a profile says, for people: tables, and one sentence on what to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pdgemm.profiling.profile import AGREE, OUTSIDE, PHASES, Profile, Rank, Told
from pdgemm.support.text import counted, in_bytes

SHOWN = 16  # ranks, of which each has a line


def advice(profile: Profile) -> str:
    """One sentence: what costs most beside the products, and what to change about it."""
    report, total = profile.longest, profile.seconds
    if not report or not total:
        spent = {name: max(x.outside[name] for x in profile.ranks) for name in OUTSIDE}
        told = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in spent.items() if seconds)
        return f"No product was traced{': ' * bool(told)}{told}."
    if profile.crowded:
        return (
            f"More threads than cores ({profile.crowded[0]}): start fewer ranks, or give each fewer threads by "
            "OMP_NUM_THREADS, before anything else."
        )
    found = [
        *_waits(profile, report),
        *_work(profile, report),
        (
            float(np.mean([x.moving for x in profile.ranks])),
            f"redistribution of {', '.join(move.name for move in report.moves)} takes {{share}} of the time: "
            "store or make the matrices in the layout that the plan wants (`pdgemm.plan` names it), or use the "
            "algorithm that takes them as they lie (summa)",
        ),
        (
            profile.mean("pack"),
            "packing takes {share} of the time: larger blocks of the layout leave panels in one piece",
        ),
        (
            profile.mean("plan"),
            "checks, planning and new memory take {share} of the time: for products of the same matrices, "
            "`plan(...).prepare(...)` does that once",
        ),
    ]
    lost, text = max(found)
    if lost < 0.05 * total:
        share = profile.mean("product") / total
        rate = "" if profile.rate is None else f", at {profile.rate:.0%} of the calibrated rate"
        return f"Nothing stands out: products take {share:.0%} of the time{rate}."
    text = text.replace("{share}", f"{lost / total:.0%}")
    return f"{text[0].upper()}{text[1:]}."


def _waits(profile: Profile, report: Told) -> Iterator[tuple[float, str]]:
    """Seconds lost by waiting, and what to do."""
    wait = profile.mean("wait")
    slow = [
        x["kind"]
        for x in profile.transfers()
        for best in (x["calibrated_between_nodes"] or x["calibrated_inside_a_node"],)
        if x["gb_per_second"] and best and x["gb_per_second"] < best / 3
    ]
    received, bound = report.counted.words_received, report.lower_bound_words
    if not report.lookahead:
        yield wait, "waiting for transfers takes {share} of the time and no panel is fetched ahead: --lookahead 1"
    elif report.panels < 4 and report.panels > 0 and report.algorithm in ("summa", "stationary_a"):
        yield (
            wait,
            f"waiting takes {{share}} of the time with {counted(report.panels, 'panel')}, of which the first "
            "arrives before any product: narrower panels (--panel-width)",
        )
    elif bound and received > 1.5 * bound:
        yield (
            wait,
            f"waiting takes {{share}} of the time, and {received / bound:.1f} times the words of the lower bound "
            "arrive: another algorithm (--algorithm auto), or more memory for layers (--memory-limit)",
        )
    elif slow:
        yield (
            wait,
            f"waiting takes {{share}} of the time, at less than a third of the calibrated bandwidth "
            f"({', '.join(slow)}): try another mover (--mover), and look at imbalance",
        )
    else:
        yield wait, "waiting takes {share} of the time: there is little to multiply per word; fewer ranks, or more work"
    yield (
        profile.mean("sync"),
        "waiting for the ranks of the node takes {share} of the time: they do not get here together, see imbalance",
    )


def _work(profile: Profile, report: Told) -> Iterator[tuple[float, str]]:
    """Seconds lost in products and between them, and what to do."""
    longest, mean = max(x.phases["product"] for x in profile.ranks), profile.mean("product")
    yield (
        longest - mean,
        f"rank {profile.critical.number} multiplies longest, {profile.imbalance:.2f} times the mean: smaller blocks, "
        "or a grid whose sides divide the matrices, spread the work more evenly",
    )
    rate = profile.rate
    if rate is not None and rate < 1:
        yield (
            mean * (1 - rate),
            f"products run at {rate:.0%} of the calibrated rate, which costs {{share}} of the time: wider panels "
            "(--panel-width), larger local parts (fewer ranks), or a look at what else runs on these cores",
        )
    between = float(np.mean([x.other + x.phases["post"] for x in profile.ranks]))
    yield between, "steps cost {share} of the time beside transfers and products: wider panels (--panel-width)"


def tables(profile: Profile) -> str:
    """For people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=160, color_system=None)
    times = Table(box=None, pad_edge=False, title="seconds of each rank", title_justify="left")
    outside = [name for name in OUTSIDE if any(x.outside[name] for x in profile.ranks)]
    names = ("total", *PHASES, "redistribute", "other", *outside)
    for name in ("rank", *names, "overlap"):
        times.add_column(name, justify="right", no_wrap=True)
    rows = {str(x.number): _row(x, outside) for x in profile.ranks}
    marked = profile.critical.number
    if len(rows) > SHOWN:
        rows = {str(marked): rows[str(marked)]}
    for number, row in rows.items():
        name = f"{number} (critical)" if number == str(marked) and len(profile.ranks) > 1 else number
        times.add_row(name, *(f"{x:.4f}" for x in row), _percent(profile.ranks[int(number)].overlap))
    columns = np.array([_row(x, outside) for x in profile.ranks])
    for name, figures in (("least", columns.min(0)), ("mean", columns.mean(0)), ("most", columns.max(0))):
        overlap = _percent(profile.overlap) if name == "mean" else ""
        times.add_row(name, *(f"{x:.4f}" for x in figures), overlap)
    moves = Table(box=None, pad_edge=False, title="transfers of all ranks", title_justify="left")
    for name in ("kind", "count", "bytes", "p50 ms", "p95 ms", "p99 ms", "waited for", "GB/s of these", "calibrated"):
        moves.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    for x in profile.transfers():
        best = x["calibrated_inside_a_node"]
        calibrated = "-" if best is None else f"{best:.2f}"
        if x["calibrated_between_nodes"]:
            calibrated += f" in a node, {x['calibrated_between_nodes']:.2f} between nodes"
        moves.add_row(
            x["kind"], str(x["count"]), in_bytes(x["bytes"]),
            *(f"{1e3 * x[f'p{q}_seconds']:.3f}" for q in (50, 95, 99)), str(x["waited_for"]),
            "-" if x["gb_per_second"] is None else f"{x['gb_per_second']:.2f}", calibrated,
        )  # fmt: skip
    with console.capture() as captured:
        console.print(times)
        if moves.row_count:
            console.print(moves)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + f"\n\n{_summary(profile)}"


def _summary(profile: Profile) -> str:
    """What the tables do not show."""
    name = profile.machine.name if profile.calibrated else "not calibrated when it was traced (--machine FILE)"
    lines = [
        f"load imbalance {profile.imbalance:.2f} (longest over mean time of products); rank {profile.critical.number} "
        f"waits least{', the others wait for it' if profile.waited_for else ''}"
        if len(profile.ranks) > 1
        else "one rank: nobody to wait for",
        f"machine: {name}; clocks of nodes agree to {max(x.clock_error_us for x in profile.about):.1f} us",
    ]
    if profile.rate is not None:
        lines.insert(1, f"products at {profile.rate:.0%} of the calibrated rate of such products")
    odd = [str(x.number) for x in profile.ranks if not x.agrees]
    if odd:
        lines.append(f"spans and reports differ by more than {AGREE:.0%} on ranks {', '.join(odd)}")
    return "\n".join([*lines, advice(profile)])


def _row(x: Rank, outside: Sequence[str]) -> list[float]:
    phases = (x.phases[name] for name in PHASES)
    return [x.seconds, *phases, x.moving, x.other, *(x.outside[name] for name in outside)]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
