"""The command line: `pdgemm` under mpirun or srun, or as one process.  Rank 0 writes all output.

Exit codes, the same on all ranks:

    0           done
    1           a result is wrong (`verify`, `--verify`, `--protect`), no plan fits the memory (`plan`), or a case was
                not measured (`scaling`)
    2           bad input
    3           an unexpected error; the whole job is ended
    130, 143    ended by SIGINT, or by SIGTERM or SIGUSR1
"""

from __future__ import annotations

import gc
import sys
import traceback
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from pdgemm.errors import CorruptionError, PdgemmError
from pdgemm.support import launcher
from pdgemm.support.text import echo, on_command_line
from pdgemm.tools.cli.job import Job, NoMPIError

_MODULES = {  # the modules of commands, each with functions of these names; the hyphen is an underscore
    "pdgemm.tools.cli.product_commands": ("generate", "multiply", "einsum", "verify"),
    "pdgemm.tools.cli.linalg_commands": ("solve", "lstsq", "svd", "eigh", "rank", "gram"),
    "pdgemm.tools.verification.hpl": ("hpl",),
    "pdgemm.tools.cli.plan_commands": ("plan", "simulate", "calibrate"),
    "pdgemm.tools.cli.model_commands": ("model",),
    "pdgemm.tools.cli.scaling": ("scaling",),
    "pdgemm.tools.verification.verify_training": ("verify-training",),
    "pdgemm.tools.cli.report_commands": ("plot", "profile", "info"),
}
COMMANDS = {name: module for module, names in _MODULES.items() for name in names}


class _Commands(click.Group):
    """A click group that imports the module of a command when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        with on_command_line():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0].endswith(".py"):
            raise click.UsageError(f"{args[0]} is not a command: python -m pdgemm {args[0]} runs a script")
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            begun = [name for name in sorted(COMMANDS) if args[0] and name.startswith(args[0])]
            close = begun or get_close_matches(args[0], COMMANDS, 1)
            advice = f"Did you mean '{close[0]}'?" if close else f"The commands are {', '.join(sorted(COMMANDS))}."
            raise click.UsageError(f"No such command '{args[0]}'. {advice}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pdgemm")
def cli() -> None:
    """Multiply, solve and factor dense matrices that are spread over the ranks of an MPI job.

    Run alone or on many ranks: mpirun -n 4 pdgemm multiply a.h5:/x b.h5:/y -o c.h5:/z

    Run a script of your own and print each of its errors once: mpirun -n 4 python -m pdgemm script.py
    """


def main() -> None:
    """Run `pdgemm` and exit; the entry point of the console script."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be undecodable
    job = Job(sys.argv[1:])
    try:
        code = run_command(job, "--debug" in sys.argv)
    except BaseException as error:  # perhaps raised on this rank only
        code = job.failed(error)
    code = job.leave(code)
    gc.freeze()  # a fast exit: the last garbage collection skips all loaded modules
    sys.exit(code)


def run_command(job: Job, debug: bool) -> int:
    """Run the command of sys.argv, and return its exit code."""
    try:
        if launcher.launched_size() > 1:  # all ranks compare their commands, and end with the same exit code
            with suppress(NoMPIError):  # a command that needs MPI raises the exception again
                job.start()
        return cli.main(prog_name="pdgemm", standalone_mode=False, obj=job) or 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as bad:
        echo(bad.format_message())
        return 2
    except (click.ClickException, PdgemmError) as bad:  # raised on all ranks together
        if job.rank == 0:
            if debug:
                traceback.print_exc()
            echo(f"pdgemm: error: {line_of(bad)}", err=True)
        return code_of(bad)


def code_of(error: Exception) -> int:
    """Return the exit code of a command, or of a script, that ends with this error."""
    return 1 if isinstance(error, CorruptionError) else 2


def line_of(error: Exception) -> str:
    """Return the text of an error in one line."""
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    return " ".join(message.split())
