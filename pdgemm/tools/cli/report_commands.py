"""`pdgemm info`, `profile` and `plot` show the installation, the profile of a trace, and the results of studies."""

from __future__ import annotations

from pathlib import Path

import click

from pdgemm.support.text import Table, echo
from pdgemm.tools.cli import options
from pdgemm.tools.cli.job import OfAllRanks, OfOneRank


@click.command(cls=OfAllRanks, short_help="Show what this installation supports.")
@click.option("--report", "as_report", is_flag=True, help="Print a block to paste into the report of a problem.")
@options.json_
@options.debug
def info(as_report: bool, as_json: bool) -> int:
    """Show what this installation supports, what is missing, and how to install it."""
    from pdgemm.tools.cli.session import session
    from pdgemm.tools.profiling.environment import describe, fact_rows, problem_report

    if as_report and as_json:
        raise click.UsageError("--report and --json are two forms of the same facts: choose one")
    with session(None, as_json) as say:
        facts = describe(say.grid)
        if as_json:
            say.facts.update(facts)
        elif as_report:
            if say.grid.rank == 0:
                echo(problem_report(facts))
        else:
            echo(Table(("", ""), fact_rows(facts), words=("",)))
    return 0


@click.command(cls=OfOneRank, short_help="Show how a traced run spent time.")
@click.argument("trace_file", type=click.Path(dir_okay=False))
@options.machine
@options.picture("FILE.html, .png or .svg: the timeline of all ranks; in HTML with the tables.")
@options.force
@options.json_
@options.debug
def profile(trace_file: str, machine_file: str | None, picture: Path | None, force: bool, as_json: bool) -> int:
    """Show how the time in a file of `--trace` was spent, by phase and by rank.  Needs no MPI."""
    from pdgemm.planning.machines.known_machines import machine_of
    from pdgemm.tools.profiling.profile import load_profile
    from pdgemm.tools.profiling.profile_tables import tables

    pictures = options.pictures_for(picture, force, of_runs=True)
    figures = load_profile(Path(trace_file), machine_of(machine_file) if machine_file else None, picture is not None)
    if pictures:
        pictures.draw_timeline(figures, picture, f"Timeline of {trace_file}")
    return options.show(as_json, figures.as_dict(), tables(figures), picture)


@click.command(cls=OfOneRank, short_help="Draw a report of scaling studies.")
@click.argument("studies", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="FILE.html, .png or .svg.")
@options.machine
@click.option(
    "--predict-to",
    type=click.IntRange(1, 1 << 17),
    help="Largest number of ranks predicted; default: so many that measurements take half of the axis.",
)
@options.force
@options.debug
def plot(studies: tuple[Path, ...], out: Path, machine_file: str | None, predict_to: int | None, force: bool) -> int:
    """Write a report of files of `pdgemm scaling`, with predictions for more ranks.  Needs no MPI.

    HTML has figures, captions, a table of all measurements and how they were made; an image has only the figures.
    """
    from pdgemm.tools.studies.plot import report

    report(studies, out, machine_file, predict_to, force)
    return 0
