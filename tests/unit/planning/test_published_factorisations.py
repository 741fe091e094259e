"""Predictions beside published Cholesky and LU factorisations.  No MPI."""

from __future__ import annotations

from collections import defaultdict

import jobs

from pdgemm.planning.machines.known_machines import CLUSTERS
from pdgemm.planning.published import published_factorisations as published
from pdgemm.planning.published.published_products import PublishedRow, errors


def by_program(rows: list[PublishedRow]) -> dict[str, list[PublishedRow]]:
    sorted_rows = defaultdict(list)
    for x in rows:
        sorted_rows[x.source.removeprefix(f"{published.SC21}: ")].append(x)
    return sorted_rows


def test_seconds_of_rows_that_were_not_fitted() -> None:
    """The largest errors are of n = 16384 on many ranks, where programs take longer for a panel than their plans."""
    rows = [*published.factorisation_times()]
    limits = {
        "MKL, cholesky": (6, 0.28, 0.46),
        "SLATE, cholesky": (6, 0.44, 0.70),
        "COnfCHOX, cholesky": (4, 0.22, 0.43),
        "MKL, lu": (6, 0.40, 0.63),
        "SLATE, lu": (6, 0.46, 0.65),
    }
    programs = by_program(rows)
    assert programs.keys() == limits.keys()
    for program, (number, usual, most) in limits.items():
        mean, largest = errors(programs[program])
        assert len(programs[program]) == number and mean <= usual and largest <= most, (program, mean, largest)
    (largest_cholesky,) = (x for x in programs["SLATE, cholesky"] if "1024 ranks" in x.how and x.case == "n = 131072")
    assert abs(largest_cholesky.difference) <= 0.1 and not largest_cholesky.fitted
    assert 0 < sum(x.fitted for x in rows) <= len(CLUSTERS[published.MACHINE].by_hand) <= 3


def test_bytes_of_scalapack() -> None:
    """MKL's Cholesky sends the words of ours, SLATE's LU as well; MKL's LU sends more, SLATE's Cholesky less."""
    ranges = {
        "MKL, cholesky": (0.0, 0.004),
        "SLATE, cholesky": (0.13, 0.69),
        "MKL, lu": (-0.49, -0.34),
        "SLATE, lu": (0.01, 0.09),
    }
    programs = by_program([*published.factorisation_bytes()])
    assert programs.keys() == ranges.keys()
    for program, (least, most) in ranges.items():
        assert all(least <= x.difference <= most for x in programs[program]), programs[program]
        assert not any(x.fitted for x in programs[program])


def test_plans_need_no_mpi() -> None:
    """The plan is the same in an interpreter that cannot import mpi4py."""
    code = (
        "import sys; sys.modules['mpi4py'] = None; "
        "from pdgemm.planning.published import published_factorisations as x; print(x.predicted('lu', 90, (2, 3), 8))"
    )
    done = jobs.run(jobs.python(0, "-c", code))
    assert done.stdout.strip() == str(published.predicted("lu", 90, (2, 3), 8)), done.stderr
