"""Plant 133 bugs, one at a time in a copy of the checkout, and report whether tests catch each.

    python scripts/hardening/mutants.py                  each bug with its tests, with the cases of scripts/test.sh
    python scripts/hardening/mutants.py --all            with the cases of scripts/test.sh --all
    python scripts/hardening/mutants.py --tests COMMIT   with the tests of that commit, all cases on each rank count
    python scripts/hardening/mutants.py --check          only check that each bug applies

Each bug breaks a promise of ARCHITECTURE.md or of a docstring: counts, orders, waits, agreement, files, bounds.  A bug
is caught if a test fails or exceeds its time limit with the bug, and passes without it.
Exit codes: 0 all bugs are caught (with --check: apply), 1 some are not, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers")]

from house import MODULES, trees  # noqa: E402

COPIED = (
    "pdgemm", "grids", "io", "tests", "scripts", "slurm", "docs", "pyproject.toml", "setup.cfg", "README.md",
    "CHANGELOG.md", "CITATION.cff", "Containerfile", "LICENSE", ".ci", ".dockerignore", ".github",
    ".pre-commit-config.yaml",
)  # fmt: skip
SECONDS = 400  # the time limit of one command
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class Mutant(NamedTuple):
    """A bug: `old`, which occurs once in `place`, is replaced by `new`.

    place : the name of a function, "residual" or "Output.publish", a class, or a module, "pdgemm.errors".  If the name
            is ambiguous, the last part of the module's name stands before it: "lu:_eliminated".
    tests : the runs that must catch it, "RANKS PATH..."; 0 ranks means without MPI.
    """

    name: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        """The module of `place`, as `house` names it; "" if the bug does not apply."""
        return next((x.module for x in places(self)), "")


class Part(NamedTuple):
    """A function, a class or a module: lines[first:last] of a module."""

    module: str
    first: int
    last: int


U, R, D = "tests/unit/", "tests/ranks/", "tests/device/"
TRAINED = f"2 {R}training/test_meshes.py"
MUTANTS = [
    Mutant("arrays: a piece for a device is overwritten in pinned memory", "set_elements",
           "if len(copies) == 2:", "if len(copies) == 3:", (f"2 {D}test_device_statistics.py",)),
    Mutant("arrays: 16-bit numbers are added up in 16 bits", "arithmetic",
           "return common(*(TYPE[dtype].sums_dtype if dtype in NARROW else dtype for dtype in dtypes))",
           "return common(*dtypes)", (f"2 {R}matrix/test_views.py {U}test_element_types.py",)),
    Mutant("support: a flag of one rank counts only if all ranks set it", "agree",
           "digest, -digest, -flag])", "digest, -digest, flag])",
           (f"2 {R}support/test_agreement.py {R}planning/test_plans.py {R}transport/test_shared.py",)),
    Mutant("support: a file that changed after its check is replaced", "Output.publish",
           "if state(self._target) != self._before:", "if state(self._target) is None != self._before:",
           ("0 tests/io/test_outputs.py",)),
    Mutant("support: the watchdog does not see a wait for panels", "Transfers.wait",
           'with self._recorder.phase("wait"), Wait():', 'with self._recorder.phase("wait"):',
           (f"0 {U}test_waits.py",)),
    Mutant("support: the watchdog ends a job while a rank computes", "Watchdog._missing_ranks",
           "working = any(", "working = False and any(",
           (f"0 {R}support/test_stopped_ranks.py",)),
    Mutant("support: a changed file with its old time counts as unchanged", "state_of",
           "status.st_mtime_ns, status.st_ctime_ns)", "status.st_mtime_ns, 0)",
           ("0 tests/io/test_outputs.py", "2 tests/io/test_checkpoint_inputs.py")),
    Mutant("support: a failure of a rank does not wake waiting ranks", "FailureDetector._notice",
           "for comm in self._comms if self._patience else ():", "for comm in ():", ("0 tests/cli/test_survivors.py",)),
    Mutant("support: the data of another program is replaced", "check_replaced",
           "if not (ours or overwrite):", "if False:", ("2 tests/io/test_replaced.py",)),
    Mutant("support: a rename that the storage lost counts as done", "rename",
           "check_named(new, before)", "assert before", ("2 tests/io/test_replaced.py",)),
    Mutant("blas: columns that overlap are multiplied", "_stride",
           "return 0 if ragged or ld < rows else ld", "return 0 if ragged else ld", (f"0 {U}test_local.py",)),
    Mutant("blas: threads of the whole node are left to one rank", "NodeCores.used",
           "library.set_num_threads(number)", "library.set_num_threads(self.threads)",
           (f"2 {R}eigen/test_eigh.py",)),
    Mutant("linalg: one rank computes without the cores of the node", "cores_of_node",
           "if ranks > 1 and not grid.idle", "if ranks > 2 and not grid.idle", (f"2 {R}linalg/test_linalg_solve.py",)),
    Mutant("linalg: blocks of one rank end panels", "in_joined_blocks",
           "A.distribution.canonical", "A.distribution", (f"1 {R}test_one_rank.py",)),
    Mutant("linalg: products decompose matrices with few large singular values", "svd:_is_flat",
           "n / 8 * X", "1 / 8 * X", (f"2 {R}eigen/test_linalg_svd.py",)),
    Mutant("models: stage 3 gathers parameters once", "LineState.moved",
           "(0, 1, 1, (self.users + 1) * m)[self.zero]", "(0, 1, 1, self.users + 1)[self.zero]",
           (f"0 {U}planning/test_model_plans.py",)),
    Mutant("grids: a window's skip is subtracted only for block 0", "BlockCyclic.to_local",
           "lacking = self.skip * (block % self.parts == 0)", "lacking = self.skip * (block == 0)",
           (f"0 {U}test_distribution.py",)),
    Mutant("tensors: runs of a slow axis are as far apart as in the target", "IndexProduct._maps",
           "*(x.count(at) for x, at in zip(ends, here))", "*[ends[1].count(here[1])] * 2",
           (f"0 {U}tensors/test_tensor_layouts.py",)),
    Mutant("tensors: the diagonal takes the local index of the divided axis", "einsum:_diagonal",
           "n = x.layout.indices(first, x.grid.coords)", "n = np.arange(len(x.layout.indices(first, x.grid.coords)))",
           (f"2 {R}tensors/test_einsum.py",)),
    Mutant("tensors: an element is broadcast only to the first part of an axis", "spread_layout",
           "np.zeros(parts, np.int64), np.arange(parts)", "np.zeros(1, np.int64), np.arange(1)",
           (f"0 {U}tensors/test_tensor_layouts.py", f"2 {R}tensors/test_tensor_functions.py")),
    Mutant("tensors: the zeros of a rank without elements are a partial result", "tensor_reductions:_joined",
           "or T.layout.dim(axis).count(part)", "or True", (f"2 {R}tensors/test_tensor_functions.py",)),
    Mutant("tensors: sums of 16-bit numbers are added in 16 bits", "folds:widened",
           "x.astype(np.float32) if x.dtype in NARROW else x", "x", (f"2 {R}tensors/test_tensor_functions.py",)),
    Mutant("tensors: what a product moves is sent where the plan reads it", "einsum:_readable",
           "if x.unfolding.shared or", "if True or", (f"4 {R}tensors/test_einsum.py",)),
    Mutant("grids: a freed gap is not joined with the previous gap", "Heap._join",
           "for left in (at, at - 1):", "for left in (at,):",
           (f"0 {R}grids/test_shared_heap.py", f"4 {R}grids/test_shared_heap.py")),
    Mutant("instrument: words read in place are not counted", "Traffic.read",
           "self.words_received += words", "pass", (f"4 {R}algorithms/test_any_problem.py",)),
    Mutant("model: a rank forwards panels of the wrong owner", "broadcasts",
           "owner = (me - distance) % parts", "owner = (me + distance) % parts",
           (f"0 {U}schedules/test_schedule.py", f"3 {R}algorithms/test_algorithms.py")),
    Mutant("model: a pair of a rank with itself counts as two ranks", "_away",
           "/ (length * (length - 1))", "/ (length * length)",
           (f"0 {U}planning/test_model.py {U}planning/test_planner.py",)),
    Mutant("devices: copies do not wait for products", "DeviceRecorder.order_copies_after_products",
           "self.transfer.wait_event(self._computed)", "pass", (f"4 {D}test_device.py",)),
    Mutant("devices: the host waits for NCCL without polling for errors", "Cuda.happened",
           "cuda_nccl.check()", "pass", (f"2 {D}test_nccl_failures.py",)),
    Mutant("devices: a rank aborts NCCL without telling other ranks", "_Communicator.abort",
           "for rank in range(self._size) if rank != self._rank)", "for rank in ())", (f"2 {D}test_nccl_failures.py",)),
    Mutant("devices: after an exception other ranks wait in NCCL", "kept_if_it_fails.__exit__",
           'device.abandon_nccl(f"{type(error).__name__}: {error}")', "pass", (f"2 {D}test_nccl_failures.py",)),
    Mutant("devices: NCCL is used again in a grid where it failed", "reach",
           "outcome._replace(nccl=aborts == cuda_nccl.aborts())", "outcome", (f"2 {D}test_nccl_failures.py",)),
    Mutant("devices: memory is allocated again before all ranks have unmapped it", "allocated",
           "comm.Barrier()", "pass", (f"2 {D}test_cuda_reach.py",)),
    Mutant("devices: mapped memory stays mapped when memory is short", "IpcMemory.gather",
           "1 if rows[:, -1].any() else _UNUSED", "_UNUSED", (f"2 {D}test_cuda_reach.py",)),
    Mutant("schedules: a rank sends its own array in place of an inherited one", "InheritedExchange.blocks",
           "self.held(holder).index(block.peer))", "0)", (f"4 {R}support/test_resilience.py",)),
    Mutant("planning: layers send no part of C", "priced",
           " + m_loc * n_loc * (1 - 1 / c) * (k > 0)", "",
           (f"0 {U}planning/test_model.py {U}planning/test_planner.py",)),
    Mutant("tensor-parallel: an uneven shard is cut at the even border", "StationaryExecutor.__call__",
           "panel = column_panel(call.C, plan.C.order, step.a, slot.buffer_a, travels=False)",
           "panel = call.C[:, call.C.shape[1] // plan.B.distribution.cols.parts * step.row :][:, : step.width]",
           (f"4 {R}algorithms/test_tensor_parallel.py",)),
    Mutant("tensor-parallel: the words of an all-gather count the rank's own part", "broadcasts",
           "received, entry = breadth * (inner.n - inner.count(me)), MOVERS[mover]",
           "received, entry = breadth * inner.n, MOVERS[mover]", (f"4 {R}algorithms/test_tensor_parallel.py",)),
    Mutant("tensor-parallel: the words of a reduce-scatter count the rank's own sums", "Reduction.traffic",
           "received = mine * others", "received = mine * self.layers",
           (f"4 {R}algorithms/test_tensor_parallel.py",)),
    Mutant("matrix: the residual's bound is that of double precision", "residual",
           "dtypes.eps(C.dtype) / 2 if C.dtype in dtypes.NARROW else 0.0", "0.0",
           (f"2 {R}matrix/test_residual.py {R}matrix/test_views.py",)),
    Mutant("matrix: arrays that differ among the ranks become one matrix", "Constructors.from_global",
           "if check and grid.size > 1:", "if check and grid.size > 99:", (f"4 {R}matrix/test_arguments.py",)),
    Mutant("movers: messages are limited by words of 8 bytes, whatever the type", "pieces",
           "words = LARGEST_MESSAGE_BYTES // x.itemsize", "words = LARGEST_MESSAGE_BYTES // 8",
           (f"4 {R}algorithms/test_algorithms.py",)),
    Mutant("movers: a block is overwritten before it has left", "RingShift.start",
           "self._transfers.wait(self._leaving[self._turn])", "pass", (f"4 {R}transport/test_overlap.py",)),
    Mutant("movers: the old Y is dropped where it is not contiguous", "_by_index",
           "kept = y[:, here]", "kept = np.zeros_like(y[:, here])",
           (f"4 {R}algorithms/test_any_problem.py",)),
    Mutant("movers: permuted rows are copied as contiguous rows", "_by_index",
           "side_by_side = bool((np.diff(here) == 1).all())", "side_by_side = here[-1] - here[0] + 1 == len(here)",
           (f"2 {R}algorithms/test_selection.py",)),
    Mutant("algorithms: a converted panel is not conjugated", "Accumulator._ready",
           "Combine(conjugated=layout.conjugated, through", "Combine(through",
           (f"1 {R}algorithms/test_algorithms.py",)),
    Mutant("algorithms: parts of several owners overwrite each other", "BroadcastPanels.panel",
           "self._bring(there, owner, slot, self._rows * (at - cols.size))", "self._bring(there, owner, slot, 0)",
           (f"4 {D}test_device.py {D}test_planted_races.py",)),
    Mutant("slices: panels are wider than float32 adds up exactly", "Emulation.widest",
           "_EXACT // 4 ** (self.bits - 1) // self.slices", "_EXACT // 4 ** (self.bits - 1)",
           (f"2 {R}algorithms/test_emulated.py",)),
    Mutant("slices: infinite elements are split into slices", "Accumulator._add_slices",
           "if not (finite(A, self.arithmetic.accumulate) and finite(B, self.arithmetic.accumulate)):",
           "if not finite(A, A.dtype):", (f"2 {R}algorithms/test_emulated.py",)),
    Mutant("protection: errors relative to a row's maximum are ignored", "RowChecksums._of_a",
           "norms = norms + self._of_largest *", "norms = norms + 0 *", (f"2 {R}algorithms/test_emulated.py",)),
    Mutant("protection: high bits of elements cancel in a checksum", "_row_sums_on_host",
           "(bits ^ bits >> np.uint64(32)) @ v", "bits @ v", ("2 tests/io/test_hdf5.py",)),
    Mutant("protection: a repeated product starts from the wrong C", "protected",
           "C.stored[...] = entry", "pass", (f"2 {R}algorithms/test_protection.py",)),
    Mutant("protection: rows with NaN of A or B are reported as wrong", "RowChecksums._ratio",
           "unknown = ~np.isfinite(tau) | (~np.isfinite(ratio) & ~(most < self._most))", "unknown = tau < 0",
           (f"2 {R}algorithms/test_protection.py",)),
    Mutant("protection: norms of tiny rows underflow when squared", "_row_norms",
           "if scaled.any():", "if (norms := np.where(norms == 0, np.inf, norms)) is None:",
           (f"2 {R}algorithms/test_protection_rows.py",)),
    Mutant("verify: zeros in place of C pass where the bound is large", "Residual.passed",
           "return not self.wrong and tells", "return not self.wrong", (f"2 {R}matrix/test_residual.py",)),
    Mutant("verify: if a sum overflows, any error is within the bound", "residual",
           "(left + own, right + scale)", "(left, right)", (f"2 {R}matrix/test_residual.py",)),
    Mutant("epilogue: the epilogue is applied before the last sum", "Prepared.run",
           "multiply(beta, start, notify)\n        C.report = report = self._end.end(report) if self._end else report",
           "(self._end.end(None) if self._end else None) or multiply(beta, start, notify)\n        C.report = report",
           (f"4 {R}algorithms/test_epilogue.py",)),
    Mutant("epilogue: sums are rounded to the type of C first", "ProductPlan.sums",
           "return C if ending and ending.dtype != C.dtype else None", "return None",
           (f"4 {R}algorithms/test_epilogue.py",)),
    Mutant("batched: the buffer is too small for one large item", "_Multiply.__init__",
           "max(0 if self.alike else need.max(initial=0), min(CHUNK_BYTES, need.sum()))",
           "min(CHUNK_BYTES, need.sum())", (f"2 {R}algorithms/test_batched.py",)),
    Mutant("grouped: a group without rows shifts the next groups", "Routing.batch_of",
           "ends = np.cumsum([0, *self.sizes[", "ends = np.cumsum([0, *np.maximum(1, self.sizes)[",
           (f"1 {R}algorithms/test_grouped.py",)),
    Mutant("factors: the other factor of a product is not conjugated", "RankUpdate.operands",
           "right = right.H if self.hermitian else right.T", "right = right.T",
           (f"4 {R}linalg/test_linalg_rank_k.py",)),
    Mutant("factors: both triangles of a result are written", "_rank_k",
           "protect=None, triangle=uplo)", 'protect=None, triangle="")', (f"4 {R}linalg/test_linalg_rank_k.py",)),
    Mutant("factors: a sketch without digits left is not drawn again", "PivotedHouseholder._follow",
           "if not sizes.min() > np.sqrt(dtypes.eps(R.dtype)) * self._largest:", "if False:",
           (f"1 {R}linalg/test_linalg_qr.py",)),
    Mutant("factors: inertia counts rounding errors of zeros", "inertia",
           "least = len(A) * np.finfo(w.dtype).eps * np.abs(w).max(initial=0)", "least = 0.0",
           (f"2 {R}eigen/test_eigh.py",)),
    Mutant("factors: if pivots underflow, the determinant is 0", "lu:_eliminated",
           "if multiplier * least < np.finfo", "if 0 * least > np.finfo",
           (f"1 {R}linalg/test_linalg_equilibration.py",)),
    Mutant("panel_algorithms: Q is accepted though not orthonormal", "cholesky_qr",
           "last = departure <= NEAR", "last = departure <= NEAR or number == 2",
           (f"2 {R}linalg/test_linalg_qr.py",)),
    Mutant("panel_algorithms: rows of X are read before they are solved", "_Panels._post",
           "rows, slot, PANEL, ready=not plan.solves)", "rows, slot, PANEL, ready=True)",
           (f"4 {R}linalg/test_linalg_factors.py",)),
    Mutant("panel_algorithms: products do not wait for a triangle", "_Panels._triangle",
           "self._task.copied()", "pass", (f"4 {D}test_device_panels.py",)),
    Mutant("panel_schedules: rows that are exchanged twice are misplaced", "RowMoves.of",
           "lying[here], lying[there] = lying[there], lying[here]", "lying[here], lying[there] = there, lying[here]",
           (f"0 {U}schedules/test_panel_schedules.py", f"4 {R}linalg/test_linalg_factors.py")),
    Mutant("transport: after an exception the device still writes to C", "kept_if_it_fails.__exit__",
           "if not all(map(_is_idle, used))", "if False", (f"1 {D}test_device.py",)),
    Mutant("panel_movers: a panel is rewritten while it is read", "GatheredPanels.gather",
           "task.wait(slot)", "pass", (f"4 {R}linalg/test_linalg_factors.py",)),
    Mutant("spectral: the error bound ignores values after the k-th", "missing",
           "rest = min(rest, float(s[k] + residuals[k]))", "rest = 0.0", (f"1 {R}eigen/test_linalg_svd.py",)),
    Mutant("statistics: equal elements of lower ranks are not counted", "cuts_of",
           "comm.Exscan(equal, earlier)", "earlier[:] = 0", (f"2 {R}algorithms/test_statistics.py",)),
    Mutant("training: a pass gathers blocks of other chunks", "Run._begin_forward",
           "if not self.chain or self.chain.computes(unit):", "if True:", (f"4 {R}training/test_planned_words.py",)),
    Mutant("scalapack: the conjugate transpose is the transpose", "p_tran",
           'redistribute(A.H if routine.endswith("C") else A.T, C,', "redistribute(A.T, C,",
           (f"4 {R}interop/test_scalapack.py",)),
    Mutant("profiling: clocks run at one rate", "on_root_clock",
           "(t - before.here) * rate", "(t - before.here)", ("2 tests/cli/test_trace.py",)),
    Mutant("training studies: words are compared with themselves", "measure:_received",
           "sum(words != expected for", "sum(words != words for", ("0 tests/studies/test_training_study.py",)),
    Mutant("cli: some ranks end with another exit code", "Job.leave",
           "return self._world.allreduce(code, MPI.MAX)", "return self._world.allreduce(code, MPI.MIN)",
           ("0 tests/cli/test_cli.py",)),
    Mutant("streamed: a panel is read into a buffer that is in use", "Panels.begin",
           "self._buffers.reverse()", "pass", ("2 tests/io/test_files_product.py",)),
    Mutant("streamed: a tile is formed in the buffer of an unwritten tile", "FilesProduct._multiply",
           "out.end(slab)\n", "pass\n", ("2 tests/io/test_files_product.py",)),
    Mutant("streamed: a panel that is in memory is read again", "Tiling.steps",
           "l = at if number % 2 == 0 else parts - 1 - at", "l = at", (f"0 {U}test_tilings.py",)),
    Mutant("streamed: a resumed job ignores the saved sums of its tile", "Checkpoints.load_sums",
           "return transfer_part(get, tile, (0, 0), tile.dtype.itemsize)", "return tile.local.nbytes",
           ("2 tests/io/test_checkpoints.py",)),
    Mutant("streamed: a resumed job does not check the saved checksum", "is_whole",
           "return _sum_of_tiles(grid, place, tiling, dtype) == checksum.as_text(left.total)", "return True",
           ("2 tests/io/test_checkpoints.py",)),
    Mutant("streamed: C is replaced before its checkpoint is removed", "checkpoints",
           "place.checkpoint.unlink(missing_ok=True)", "pass", ("2 tests/io/test_checkpoints.py",)),
    Mutant("streamed: a job resumes though its inputs have changed", "look_for_unfinished",
           'if before["inputs"].get(x.what) != now["inputs"][x.what]:', "if False:",
           ("2 tests/io/test_checkpoint_inputs.py",)),
    Mutant("streamed: checkpoints of two datasets share a name", "place_of",
           'lambda x: f"%{ord(x[0]):02X}"', 'lambda x: "."', ("2 tests/io/test_checkpoints.py",)),
    Mutant("plans: panels are numbered as if no owner pair ran out", "_classes",
           "before += len(left) * (end - start)", "before += len(pairs) * (end - start)",
           (f"0 {U}planning/test_little_memory.py",)),
    Mutant("io: a dataset's metadata are not read back from the disk", "NewDataset.complete",
           "on_root(self._comm, self._path, self.check_held)", "pass", ("2 tests/io/test_hdf5_faults.py",)),
    Mutant("io: small matrices that an exchange lost are published", "ManyDatasets.check_elements",
           "if texts(self._comm, totals) != recorded:", "if False:", ("2 tests/io/test_many_matrices.py",)),
    Mutant("io: each small matrix is exchanged by itself", "parcels",
           "most[0] > ranks * ELEMENTS", "most[0] > more[0]", ("2 tests/io/test_many_matrices.py",)),
    Mutant("io: a file that cannot be opened now counts as damaged", "inspect",
           "if isinstance(bad, OSError) and bad.errno:", "if False:", ("2 tests/io/test_checkpoints.py",)),
    Mutant("io: a killed job's late save replaces that of a later job", "next_token",
           "if there is not None and last is not None and there.token.job not in (_myself, last.job):", "if False:",
           ("2 tests/io/test_state.py",)),
    Mutant("io: an older generation is lost if a storage loses its link", "linked",
           "check_named(name, state(path))", "pass", ("2 tests/io/test_replaced.py",)),
    Mutant("io: the list of matrices is not hashed", "generations:_parsed",
           "if attrs.pop(_CONTENTS, None) != _hash(attrs, matrices):", "if attrs.pop(_CONTENTS, None) is None:",
           ("1 tests/io/test_state.py",)),
    Mutant("io: many matrices are not compared with their checksums", "load_datasets",
           'check_checksum(dataset, f"{path}:{name}", computed)', "pass", ("2 tests/io/test_state.py",)),
    Mutant("io: matrices and attributes of two generations are loaded together", "hdf5:load_all",
           "if not on_root(comm, path, lambda: generations.is_there(each)):", "if False:",
           ("2 tests/io/test_state.py",)),
    Mutant("io: ranks wait for elements of a rank that lacks memory", "opened_by_one",
           "        with together(comm):  # a rank that lacks", "        with nullcontext():  # a rank that lacks",
           ("2 tests/io/test_hdf5_faults.py",)),
    Mutant("interchange: a damaged header is published", "being_written",
           "on_root(comm, path, lambda: new.check(path, partial))", "pass", ("2 tests/io/test_safetensors.py",)),
    Mutant("resilience: a step counts as done if this rank ended it", "resilient._attempt",
           "return state if agreed & _DONE else None", "return state", ("0 tests/cli/test_survivors.py",)),
    Mutant("resilience: a step may change the state", "KeptState.read_only",
           "x.flags.writeable = False", "pass", (f"4 {R}support/test_resilience.py",)),
    Mutant("collectives: parts of lower ranks are joined on the wrong side", "_by_messages",
           "step.adds, join, source < me)", "step.adds, join, source > me)", (f"4 {R}transport/test_collectives.py",)),
    Mutant("collectives: the last step of Bruck's all-gather goes around too far", "bruck_all_gather",
           "ends = at + min(distance, p - distance)", "ends = at + distance",
           (f"0 {U}schedules/test_collective_schedules.py",)),
    Mutant("programs: a product is not planned", "carried_out",
           'operands.A.grid.draft.add("C", product)', "pass", (f"2 {R}linalg/test_linalg_plans.py",)),
    Mutant("programs: redistributions of sums are not reported", "Work.add",
           "return Y if Y.later_report is before else self.did(Y)", "return Y", (f"2 {R}linalg/test_linalg_plans.py",)),
    Mutant("programs: ranks compare the addresses of objects", "agree",
           'description = _ADDRESS.sub("", description)', "pass", (f"2 {R}linalg/test_linalg_plans.py",)),
    Mutant("eigen: vectors of computed roots are formed with the old z", "_roots",
           "z = secular.loewner(factors.prod(axis=0), z)", "z = z / np.linalg.norm(z)",
           (f"1 {R}eigen/test_tridiagonal.py",)),
    Mutant("eigen: no other method is tried if block Lanczos fails", "_by_lanczos",
           "if may_fail:", "if False:", (f"1 {R}eigen/test_eigh.py",)),
    Mutant("eigen: the product of v and A v in w is not conjugated", "Tridiagonal._reduce",
           "(tau * norm_of_v).conjugate() / 2", "(tau * norm_of_v) / 2", (f"1 {R}eigen/test_tridiagonal_form.py",)),
    Mutant("eigen: tiny columns are not scaled before a reflection", "Tridiagonal._reflector",
           "if abs(beta) < self._least / self._eps:", "if False:", (f"1 {R}eigen/test_tridiagonal_form.py",)),
    Mutant("eigen: columns of a neighbour are used before they arrive", "BulgeChase._receive",
           "self._task.wait(slot)", "pass", (f"4 {R}eigen/test_tridiagonal_form.py",)),
    Mutant("singular: small singular values come from A^H A, too", "_by_gram_matrix",
           "int(np.count_nonzero(w <= LEAST**2 * w[0]))", "n", (f"2 {R}eigen/test_linalg_svd.py",)),
    Mutant("stored: sketches are not scaled when a panel is", "RangeOfPanels.bring",
           "times(x, before - self.exponent)", "pass", ("2 tests/io/test_stored_svd.py",)),
    Mutant("stored: passes are counted without the first one", "SvdPlan.passes",
           "2 * steps + 3", "2 * steps + 2", ("2 tests/io/test_stored_svd.py",)),
    Mutant("pipelines: messages of all chunks have one tag", "PipelineSchedule.number",
           "x.microbatch * self.blocks + x.block)", "x.microbatch * self.blocks + x.target)",
           (f"0 {U}schedules/test_pipeline_schedules.py",)),
    Mutant("training: gradients of a bucket are not summed over the ranks", "Storage._complete",
           "if self.line.size == 1:", "if self.line.size:", (TRAINED,)),
    Mutant("training: the weight of a microbatch is its share of this replica", "_Step.loss",
           "self._weights[microbatch] / self._weight", "self._weights[microbatch] / sum(self._weights)", (TRAINED,)),
    Mutant("training: keys and values are in the order of the ranks along cp", "Cut.moved",
           "torch.empty_like(part).index_copy_(0, self.order, part)", "part.clone()", (TRAINED,)),
    Mutant("training: the gradients of a tied table are not summed over both ends", "divided_parameters",
           "axes += [_ENDS] * (len(stages) > 1)", "axes += []", (TRAINED,)),
    Mutant("training: parameters that ranks along tp have in common count twice in the norm", "Run._reduced",
           "x.squares() / x.copies", "x.squares()", (f"4 {R}training/test_meshes.py",)),
    Mutant("training: a step does not wait for the last reductions", "Storage.finish",
           "self.line.mesh.transfers.wait(group)", "pass", (TRAINED,)),
    Mutant("training: with ZeRO 2 updated parameters are not gathered", "Storage.updated",
           "if self.layout.stage in (1, 2)", "if self.layout.stage in (1,)", (TRAINED,)),
    Mutant("training: with ZeRO 3 a bucket of two users is gathered twice", "FlatShards.traffic",
           "self.users[bucket.number] + 1", "2", (f"0 {U}schedules/test_training_values.py",)),
    Mutant("training: the largest score of a row is that of one rank's tokens", "_CrossEntropy.forward",
           'line.largest(flat_array(most), "tensor")', "pass", (TRAINED,)),
    Mutant("training: queries, keys and values are cut as one matrix", "Division.part",
           "parted.reshape(self.parts, -1, *parted.shape[1:])", "parted.reshape(1, -1, *parted.shape[1:])", (TRAINED,)),
    Mutant("training: gradients of a norm are those of one rank's positions", "Sequence.divisions",
           '"tp" if context.sequence else ""', '""', (TRAINED,)),
    Mutant("training: tables of placements are not compared among the ranks", "distribute",
           'f"{name}: {x!r}"', "name", (f"2 {R}training/test_refused_models.py",)),
    Mutant("training: an exception of a rank in a step leaves the others waiting", "ending_the_job",
           "end_job(1)", "raise", ("0 tests/cli/test_training_failures.py",)),
    Mutant("errors: an interrupt of a callback leaves the messages of a product", "GuardedCallback.__call__",
           "except BaseException as bad:", "except Exception as bad:", (f"4 {R}algorithms/test_summa.py",)),
    Mutant("training: weight products follow the sum that they are to hide", "Line.carry_out",
           "self.mesh.transfers.expect(group)\n", "self.mesh.transfers.wait(group)\n",
           (f"2 {R}training/test_meshes.py",)),
    Mutant("exchanges: ranks read the buffers of their node before messages have arrived", "send_by_nodes",
           "        end_of_span()\n        buffers.sync()\n", "        end_of_span()\n",
           (f"4 {R}transport/test_node_exchange.py",)),
    Mutant("exchanges: what stays on a node is written into the buffers that are sent", "send_by_nodes",
           "RECEIVED if is_here else SENT", "SENT",
           (f"4 {R}transport/test_node_exchange.py",)),
    Mutant("low precision: a part of a matrix has the first blocks' scales", "Scaled.__getitem__",
           "of_scales.append(slice(first, last if stop > start else first))",
           "of_scales.append(slice(0, last - first if stop > start else 0))", (f"2 {R}scaled/test_scaled.py",)),
    Mutant("low precision: a panel's scales are those of local indices", "Summa.inner",
           "inner.to_global(x.a.indices()[0], x.col)", "x.a.indices()[0]", (f"4 {R}scaled/test_scaled.py",)),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="only check that each bug applies")
    parser.add_argument("--all", action="store_true", help="run all combinations and examples of scripts/test.sh --all")
    parser.add_argument("--tests", metavar="COMMIT", help="run the tests of this commit")
    parser.add_argument("--only", default="", help="only bugs whose names contain one of these words: watchdog,blas")
    asked = parser.parse_args()
    chosen = [x for x in MUTANTS if any(part in x.name for part in asked.only.split(","))]
    wrong = [f"{x.name}: `old` occurs {n} times in {x.place}, not once" for x in chosen if (n := len(places(x))) != 1]
    named = ((x.name, path) for x in chosen for tests in x.tests for path in tests.split()[1:])
    wrong += [f"{name}: there is no {path}" for name, path in named if not (ROOT / path).exists()]
    if asked.check or wrong:
        print("\n".join(wrong) or f"{len(chosen)} bugs apply")
        return bool(wrong)
    options = () if asked.tests else ("--all",) if asked.all else ("--tiers",)
    missed = []
    for mutant in chosen:
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            start = time.monotonic()
            found = caught(mutant, Path(folder), options, asked.tests)
        print(f"{mutant.name:64} {found:50} {time.monotonic() - start:6.0f} s", flush=True)
        missed += [mutant] * found.startswith("MISSED")
    print(f"\n{len(chosen) - len(missed)} of {len(chosen)} caught")
    return bool(missed)


@cache
def lines_of(module: str) -> list[str]:
    text: str = MODULES[module].read_text()
    return text.split("\n")


@cache
def parts() -> defaultdict[str, list[Part]]:
    """Return all possible places of bugs, by name.  Functions inside functions are not listed."""
    found = defaultdict[str, list[Part]](list)

    def look(inside: ast.AST, module: str, above: str) -> None:
        for node in ast.iter_child_nodes(inside):
            name = above
            if isinstance(node, FUNCTION | ast.ClassDef):
                first = min(x.lineno for x in (node, *node.decorator_list)) - 1
                found[above + node.name].append(Part(module, first, node.end_lineno or first))
                name = f"{above}{node.name}."
            if not isinstance(node, FUNCTION):  # a class, or a condition with definitions in it
                look(node, module, name)

    for module, tree in trees().items():
        found[f"pdgemm.{module}"].append(Part(module, 0, len(lines_of(module))))
        look(tree, module, "")
    return found


def places(mutant: Mutant) -> list[Part]:
    """Return the parts with the name of the bug's place, each repeated for every occurrence of `old` in it."""
    module, _, name = mutant.place.rpartition(":")
    named = [x for x in parts()[name] if not module or f".{x.module}".endswith(f".{module}")]
    return [x for x in named for _ in range("\n".join(lines_of(x.module)[x.first : x.last]).count(mutant.old))]


def with_bug(mutant: Mutant) -> str:
    """Return the text of the bug's module with the bug."""
    (part,) = places(mutant)
    lines = lines_of(part.module)
    text = "\n".join(lines[part.first : part.last]).replace(mutant.old, mutant.new)
    return "\n".join([*lines[: part.first], text, *lines[part.last :]])


def caught(mutant: Mutant, folder: Path, options: tuple[str, ...], commit: str | None) -> str:
    """Run a bug's tests, and return "caught by TESTS" or "MISSED"."""
    copy_to(folder, commit)
    (folder / MODULES[mutant.module].relative_to(ROOT)).write_text(with_bug(mutant))
    for tests in mutant.tests:
        if not passes(tests, folder, options):
            return f"caught by {tests}" if sound(tests, options, commit) else f"MISSED: {tests} fails without it"
    return "MISSED"


@cache
def sound(tests: str, options: tuple[str, ...], commit: str | None) -> bool:
    """Return whether tests pass without a bug."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_to(Path(folder), commit)
        return passes(tests, Path(folder), options)


def copy_to(folder: Path, commit: str | None) -> None:
    leave = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=leave)
        else:
            shutil.copy(ROOT / name, folder / name)
    if commit:
        shutil.rmtree(folder / "tests")
        packed = subprocess.run(["git", "archive", commit, "tests", "pyproject.toml"], cwd=ROOT, capture_output=True)
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as tar:
            tar.extractall(folder, filter="data")


def passes(tests: str, folder: Path, options: tuple[str, ...]) -> bool:
    """Return whether these tests pass.  Paths that do not exist (in another commit) are left out."""
    ranks, *paths = tests.split()
    paths = [path for path in paths if (folder / path).exists()]
    if not paths:
        return True
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
    if int(ranks):
        words = ["mpiexec", "-n", ranks, *words, "--with-mpi", "-m", "mpi", *options]
    else:
        words += ["-m", "not mpi", *(x for x in options if x == "--all")]
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        return run.wait(SECONDS) in (0, 5)  # 5: no test was selected for this number of ranks
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, 9)
        run.wait()
        return False


if __name__ == "__main__":
    sys.exit(main())
