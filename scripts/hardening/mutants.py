"""What the suite catches: 450 bugs, planted one at a time in a copy of the checkout.

    python scripts/hardening/mutants.py                  each bug, against the tests of its folder, as scripts/test.sh
    python scripts/hardening/mutants.py --all            as scripts/test.sh --all
    python scripts/hardening/mutants.py --tests COMMIT   against all tests of that commit on each number of ranks
    python scripts/hardening/mutants.py --check          does each bug apply?

A bug is caught where a test fails, or ends by its timeout.  The same tests pass without the bug, or it does not count.
Exit codes: 0 all bugs were caught (apply), 1 some were not, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "pdgemm", "grids", "io", "tests", "scripts", "slurm", "docs", "pyproject.toml", "setup.cfg", "README.md",
    "CHANGELOG.md", "CITATION.cff", "Containerfile", "LICENSE", ".ci", ".dockerignore", ".github",
    ".pre-commit-config.yaml",
)  # fmt: skip
SECONDS = 400  # of one command


class Mutant(NamedTuple):
    """A bug: `old` becomes `new` in `file`.   tests : who has to catch it, "RANKS PATH...", 0 ranks being serial."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


U, R, D = "tests/unit/", "tests/ranks/", "tests/device/"
MUTANTS = [
    Mutant(
        "errors: a LayoutError is no ValueError", "pdgemm/errors.py",
        "class LayoutError(PdgemmError, ValueError):", "class LayoutError(PdgemmError):",
        (f"4 {R}matrix/test_views.py",),
    ),
    Mutant(
        "arrays: rare normal numbers are computed as frequent ones", "pdgemm/local/arrays/normal_numbers.py",
        "r - 1.6), r > 5.0", "r - 1.6), r > 50.0",
        (f"0 {U}test_local.py",),
    ),
    Mutant(
        "arrays: a piece for a device is overwritten in pinned memory", "pdgemm/local/arrays/elementwise.py",
        "if len(copies) == 2:", "if len(copies) == 3:",
        (f"1 {D}test_device_statistics.py",),
    ),
    Mutant(
        "arrays: 16-bit numbers are added up in 16 bits", "pdgemm/local/arrays/dtypes.py",
        "\n    return common(*(TYPE[dtype].sums_dtype if dtype in NARROW else dtype for dtype in dtypes))",
        "\n    return common(*dtypes)",
        (f"1 {R}matrix/test_views.py {U}test_element_types.py",),
    ),
    Mutant(
        "arrays: beta between 0 and 1 is taken for 1", "pdgemm/local/arrays/elementwise.py",
        "            if self.beta != 1:\n                old *= self.beta",
        "            if abs(self.beta) > 1:\n                old *= self.beta",
        (f"1 {R}algorithms/test_algorithms.py {R}algorithms/test_any_problem.py",),
    ),
    Mutant(
        "support: what any rank says is said if all do", "pdgemm/support/agreement.py",
        "digest, -digest, -flag])", "digest, -digest, flag])",
        (f"4 {R}support/test_agreement.py {R}planning/test_plans.py {R}transport/test_shared.py",),
    ),
    Mutant(
        "support: a file that changed meanwhile is replaced", "pdgemm/support/files.py",
        "if state(self._target) != self._before:", "if state(self._target) is None != self._before:",
        ("0 tests/io/test_outputs.py",),
    ),
    Mutant(
        "support: a rank that has come is said to be missing", "pdgemm/support/watchdog.py",
        "if state.reached < number}", "if state.reached <= number}",
        (f"0 {R}support/test_watchdog.py",),
    ),
    Mutant(
        "support: a wait for panels is not seen", "pdgemm/transport/movers/arrivals.py",
        'with self._recorder.phase("wait"), Wait():', 'with self._recorder.phase("wait"):',
        (f"0 {U}test_waits.py",),
    ),
    Mutant(
        "support: a job ends while a rank is at work", "pdgemm/support/watchdog.py",
        "if at_work or any(0 <= state.still <", "if at_work and any(0 <= state.still <",
        (f"0 {R}support/test_stopped_ranks.py",),
    ),
    Mutant(
        "blas: columns that overlap are multiplied", "pdgemm/local/blas/local_gemm.py",
        "return 0 if ragged or ld < rows else ld", "return 0 if ragged else ld",
        (f"0 {U}test_local.py",),
    ),
    Mutant(
        "blas: NumPy's threads take part in large products", "pdgemm/local/blas/local_gemm.py",
        "<= ONE_THREAD or threads() == 1:", "<= ONE_THREAD or threads():",
        (f"0 {U}test_local.py",),
    ),
    Mutant(
        "training: a missing gradient lets later microbatches go first", "pdgemm/parallel/line_buckets.py",
        "self._force(other, microbatch - 1)", "self._force(other, 0)",
        (f"4 {R}parallel/test_training_errors.py",),
    ),
    Mutant(
        "layers: labels are not compared along tp", "pdgemm/parallel/layers/array_checks.py",
        "numbers = np.ascontiguousarray(x, float)", "numbers = np.zeros(len(x))",
        (f"2 {R}parallel/test_layers_vocabulary.py",),
    ),
    Mutant(
        "models: MFU counts recomputed flops", "pdgemm/planning/models/model_plan.py",
        "return self._share(self.shape.flops(self.step_tokens))",
        "return self._share(self.shape.hardware_flops(self.step_tokens, self.layout.recompute))",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: untied scores have no parameters", "pdgemm/planning/models/model_shape.py",
        "self.table * (1 if self.tied else 2)", "self.table",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: gradients have the bytes of parameters", "pdgemm/planning/models/stage_state.py",
        'for kind in ("parameters", "gradients", "optimizer")}',
        'for kind in ("parameters", "parameters", "optimizer")}',
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: interleaved stages keep p microbatches", "pdgemm/planning/models/training_step.py",
        "return min(v * m, (v + 1) * p - 2 * stage - 1)", "return min(v * m, v * p)",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: gradients are not divided by tp", "pdgemm/planning/models/stage_state.py",
        "own = layers * (-(-weights.divided // t) + weights.whole)", "own = layers * (weights.divided + weights.whole)",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: rings that leave a node have one card", "pdgemm/planning/models/step_seconds.py",
        "else min(node, rings)", "else 1",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: an update in float64 takes the time of one in float32", "pdgemm/planning/models/step_seconds.py",
        "updated * element * max(4, size) / 4", "updated * element",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: homes take the time of the mean one", "pdgemm/planning/models/step_seconds.py",
        "float(at_homes.max())", "float(at_homes.mean())",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: Muon keeps both moments of matrices", "pdgemm/planning/models/training_step.py",
        'total["optimizer"] -= loads', 'total["optimizer"] -= 0 * loads',
        (f"0 {U}planning/test_model_plans.py", "4 tests/examples/test_gpt_plans.py"),
    ),
    Mutant(
        "models: a rank has an equal part of each matrix", "pdgemm/schedules/training/flat_layout.py",
        "cuts = words *", "cuts = start + (stop - start) *",
        (f"0 {U}planning/test_home_plans.py", "4 tests/examples/test_gpt_plans.py"),
    ),
    Mutant(
        "models: matrices of a stage have the places of its first block", "pdgemm/planning/models/home_plan.py",
        "stage == chunk == 0, (stage, chunk)", "stage == 0, (stage, chunk)",
        (f"0 {U}planning/test_home_plans.py",),
    ),
    Mutant(
        "models: ranks along cp are those along dp", "pdgemm/planning/models/home_plan.py",
        "% cp * dp + ranks // (storage.tp * cp)", "% dp * cp + ranks // (storage.tp * dp)",
        (f"0 {U}planning/test_home_plans.py",),
    ),
    Mutant(
        "models: more is computed again than must be", "pdgemm/planning/models/layout_search.py",
        "for x in less)", "for x in less[::-1])",
        (f"0 {U}planning/test_home_plans.py",),
    ),
    Mutant(
        "models: Muon takes five steps", "pdgemm/planning/models/step_seconds.py",
        "steps = self.layout.muon_steps", "steps = 5",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: the example plans five steps of Muon", "docs/examples/gpt/accounting.py",
        '{"muon_steps": run.optimizer.rule.steps}', "{}",
        ("4 tests/examples/test_gpt_plans.py",),
    ),
    Mutant(
        "models: homes receive their own parts, too", "pdgemm/schedules/training/home_exchange.py",
        "- 2 * self.of_homes(at_home)", "- self.of_homes(at_home)",
        (f"4 {R}parallel/test_muon.py", "4 tests/examples/test_gpt_plans.py"),
    ),
    Mutant(
        "models: measured functions are forward alone", "pdgemm/planning/models/step_seconds.py",
        "else elements * measured * self._size / 4", "else elements * measured * self._size / 4 * (1 + _BACKWARD)",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "machines: ranks are together on a node because they are few", "pdgemm/planning/machines/machine.py",
        "if self.ranks_per_node and length > 1 else 0.0",
        "if self.ranks_per_node and length > 1 and stride * length > self.ranks_per_node else 0.0",
        (f"0 {U}planning/test_model_plans.py", f"0 {U}planning/test_model.py"),
    ),
    Mutant(
        "models: slices of a product hide transfers between nodes", "pdgemm/planning/models/step_seconds.py",
        'exposed = self._exposed if self.link("tensor") == NODE else 1', "exposed = self._exposed",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: pipelines reduce gradients behind the backward pass", "pdgemm/planning/models/step_seconds.py",
        "if self.layout.pp > 1 or self.machine.device != CUDA:", "if self.machine.device != CUDA:",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: no stage waits for the sums of another", "pdgemm/planning/models/step_seconds.py",
        "stage = sum(parts.values())", 'stage = sum(parts.values()) - parts["sums"]',
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: clipping and the norm read no gradients", "pdgemm/planning/models/step_seconds.py",
        "_UPDATE, _MIXED = 28 + 4 + 8,", "_UPDATE, _MIXED = 28,",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: hosts expose rows without copies", "pdgemm/planning/models/step_seconds.py",
        "if t > 1 and machine.device == HOST:", "if t > 1 and machine.device == CUDA:",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: products of layers are as fast as panels", "pdgemm/planning/machines/machine.py",
        "return seconds + flops / rate - flops / self.rate(kind, least)", "return seconds",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: a stage has both ends", "pdgemm/planning/models/step_seconds.py",
        " * (layout.pp == 1)  # no stage", "  # no stage",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "meshes give the memory of a step back to the system", "pdgemm/support/memory_left.py",
        "(_TRIM_THRESHOLD, -1)", "(_TRIM_THRESHOLD, 1 << 17)",
        (f"0 {U}test_memory_left.py",),
    ),
    Mutant(
        "models: an all-reduce adds all that it moves", "pdgemm/planning/models/step_seconds.py",
        'kind == "gradients" and not self.layout.zero', 'kind == "gradients" and self.layout.zero > 3',
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: small microbatches cost no calls", "pdgemm/planning/models/step_seconds.py",
        '"calls": self._call("layer", t > 1) / 3', '"calls": 0.0',
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: the bubble is a share of all time", "pdgemm/planning/models/training_step.py",
        "return Fraction(p - 1, work)", "return Fraction(p - 1, work + p - 1)",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: a fused kernel skips half of attention, and so do its flops", "pdgemm/planning/models/model_shape.py",
        "return 4 * self.sequence * self.queries", "return 2 * self.sequence * self.queries",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: layers that are computed again move nothing again", "pdgemm/planning/models/training_step.py",
        't, again, layers = layout.tp, 2 if layout.recompute == "full" else 1,', "t, again, layers = layout.tp, 1,",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: stage 3 gathers parameters once", "pdgemm/planning/models/stage_state.py",
        "(0, 1, 1, 2 * microbatches)[self.zero]", "(0, 1, 1, 2)[self.zero]",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: the nearest miss is the largest one", "pdgemm/planning/models/layout_search.py",
        "plan.all_bytes < least.all_bytes", "plan.all_bytes > least.all_bytes",
        (f"0 {U}planning/test_model_plans.py",),
    ),
    Mutant(
        "models: norms are added along dp alone", "pdgemm/planning/models/stage_state.py",
        "addends = copies * t if layout.sequence else copies", "addends = copies",
        ("4 tests/examples/test_gpt_plans.py",),
    ),
    Mutant(
        "models: a tied table of two stages is divided as all others", "pdgemm/planning/models/stage_state.py",
        "LineState(ends, 2 * copies, min(1, layout.zero))", "LineState(ends, 2 * copies, layout.zero)",
        ("4 tests/examples/test_gpt_plans.py",),
    ),
    Mutant(
        "blas: a third of six cores is one", "pdgemm/local/blas/threads.py",
        "for core in cores[rank]) + 1e-9))", "for core in cores[rank])))",
        (f"1 {R}grids/test_grid.py",),
    ),
    Mutant(
        "grids: only block 0 lacks what a window skips", "grids/distribution.py",
        "lacking = self.skip * (block % self.parts == 0)", "lacking = self.skip * (block == 0)",
        (f"0 {U}test_distribution.py",),
    ),
    Mutant(
        "grids: a piece of an index map has a run too many", "grids/index_map.py",
        'self.ends.searchsorted(stop, "left")', 'self.ends.searchsorted(stop, "right")',
        (f"0 {R}algorithms/test_redistribute.py",),
    ),
    Mutant(
        "grids: a gap does not join the one before it", "grids/shared_heap.py",
        "for left in (at, at - 1):", "for left in (at,):",
        (f"0 {R}transport/test_shared.py", f"4 {R}transport/test_shared.py"),
    ),
    Mutant(
        "grids: a transposed grid keeps its rows", "grids/process_grid.py",
        "other.row, other.col = self.col, self.row", "other.row, other.col = self.row, self.col",
        (f"4 {R}grids/test_grid.py",),
    ),
    Mutant(
        "instrument: words read in place are not received", "pdgemm/instrument/recorder.py",
        "        self.words_received += words\n        self.words_read += words", "        self.words_read += words",
        (f"4 {R}algorithms/test_redistribute.py",),
    ),
    Mutant(
        "instrument: waits for ranks count as transfers", "pdgemm/instrument/report.py",
        "transfer = self.hidden_seconds + self.wait_seconds - self.sync_seconds",
        "transfer = self.hidden_seconds + self.wait_seconds",
        (f"0 {U}planning/test_model.py", "4 tests/cli/test_trace.py"),
    ),
    Mutant(
        "model: panels of the owner on the other side are forwarded", "pdgemm/schedules/formulas.py",
        "owner = (me - distance) % parts", "owner = (me + distance) % parts",
        (f"0 {U}schedules/test_schedule.py", f"3 {R}algorithms/test_summa.py"),
    ),
    Mutant(
        "model: a node holds no direction of a grid", "pdgemm/planning/machines/machine.py",
        "/ (length * (length - 1))", "/ (length * length)",
        (f"0 {U}planning/test_model.py {U}planning/test_planner.py",),
    ),
    Mutant(
        "devices: copies do not wait for products", "pdgemm/devices/streams.py",
        "            self.transfer.wait_event(self._computed)", "            pass",
        (f"4 {D}test_device.py",),
    ),
    Mutant(
        "devices: the host waits for NCCL without looking", "pdgemm/devices/cuda.py",
        "        if status:  # the event may be behind operations of NCCL\n            cuda_nccl.check()\n", "",
        (f"4 {D}test_nccl_failures.py",),
    ),
    Mutant(
        "devices: finish waits without polling", "pdgemm/devices/streams.py",
        "            self._device.wait(stream)", "            stream.synchronize()",
        (f"4 {D}test_nccl_failures.py",),
    ),
    Mutant(
        "devices: copies are waited for without polling", "pdgemm/devices/streams.py",
        "            self._device.wait(packed)", "            packed.synchronize()",
        (f"4 {D}test_nccl_failures.py",),
    ),
    Mutant(
        "devices: a rank aborts NCCL and tells nobody", "pdgemm/devices/cuda_nccl.py",
        "for rank in range(self._size) if rank != self._rank)", "for rank in ())",
        (f"4 {D}test_nccl_failures.py",),
    ),
    Mutant(
        "devices: after an exception NCCL waits for this rank", "pdgemm/transport/packed_exchange.py",
        "                device.abandon_nccl(f\"{type(error).__name__}: {error}\")", "                pass",
        (f"4 {D}test_nccl_failures.py",),
    ),
    Mutant(
        "devices: NCCL is used again in a grid where it failed", "pdgemm/devices/cuda_ipc.py",
        "outcome._replace(nccl=aborts == cuda_nccl.aborts())", "outcome",
        (f"4 {D}test_nccl_failures.py",),
    ),
    Mutant(
        "devices: memory is allocated again before all ranks have unmapped it", "pdgemm/matrix/local_arrays.py",
        "    comm.Barrier()  # until all ranks have unmapped it\n", "",
        (f"4 {D}test_cuda_layer.py",),
    ),
    Mutant(
        "devices: mapped memory stays mapped when memory is short", "pdgemm/devices/cuda_ipc.py",
        "1 if rows[:, -1].any() else _UNUSED", "_UNUSED",
        (f"4 {D}test_cuda_layer.py",),
    ),
    Mutant(
        "devices: ranks that share GPUs take them in turns", "pdgemm/devices/gpu_binding.py",
        "min(count - 1, rank * count // size)", "rank % count",
        (f"0 {D}test_gpus.py",),
    ),
    Mutant(
        "schedules: Cannon moves on by a group too early", "pdgemm/schedules/steps.py",
        "on = step % t == t - 1", "on = step % t == 0",
        (f"0 {U}schedules/test_schedule.py", f"2 {R}algorithms/test_algorithms.py"),
    ),
    Mutant(
        "schedules: a rank alone on its node is told of panels", "pdgemm/schedules/node_relay.py",
        "min(1, len(near) - 1)))[put_together]", "1))[put_together]",
        (f"3 {R}transport/test_shared.py",),
    ),
    Mutant(
        "planning: layers send no part of C", "pdgemm/planning/search/grid_search.py",
        "+ m_loc * n_loc * (1 - 1 / c) * (k > 0)\n    work", "\n    work",
        (f"0 {U}planning/test_model.py {U}planning/test_planner.py",),
    ),
    Mutant(
        "tensor-parallel: an uneven shard is cut at the even border", "pdgemm/algorithms/products/stationary.py",
        "panel = column_panel(call.C, plan.C.order, step.a, slot.buffer_a, travels=False)",
        "panel = call.C[:, call.C.shape[1] // plan.B.distribution.cols.parts * step.row :][:, : step.width]",
        (f"4 {R}algorithms/test_tensor_parallel.py",),
    ),
    Mutant(
        "tensor-parallel: the words of an all-gather count the rank's own part", "pdgemm/schedules/formulas.py",
        "received, entry = breadth * (inner.n - inner.count(me)), MOVERS[mover]",
        "received, entry = breadth * inner.n, MOVERS[mover]",
        (f"4 {R}algorithms/test_tensor_parallel.py",),
    ),
    Mutant(
        "tensor-parallel: the words of a reduce-scatter count the rank's own sums",
        "pdgemm/schedules/products/reduction.py",
        "received = share.mine * others", "received = share.mine * self.layers",
        (f"4 {R}algorithms/test_tensor_parallel.py",),
    ),
    Mutant(
        "tensor-parallel: a rank's own sums are left out", "pdgemm/algorithms/products/layer_sums.py",
        "mine += own", "own = None",
        (f"4 {R}algorithms/test_tensor_parallel.py", f"3 {R}transport/test_overlap.py"),
    ),
    Mutant(
        "planning: columns are one row", "pdgemm/planning/problem.py",
        '"column": (column,)', '"column": (row,)',
        (f"0 {U}planning/test_planner.py", f"4 {R}planning/test_plans.py"),
    ),
    Mutant(
        "matrix: column sums are added up along rows", "pdgemm/matrix/distmatrix.py",
        "axis=0 if kind in (1, -1) else 1", "axis=1 if kind in (1, -1) else 0",
        (f"4 {R}matrix/test_matrix.py",),
    ),
    Mutant(
        "matrix: the smallest products are dealt out first", "pdgemm/schedules/dealing.py",
        "key=lambda item: -flops[item])", "key=lambda item: flops[item])",
        (f"1 {R}algorithms/test_batched.py",),
    ),
    Mutant(
        "matrix: the residual's bound is that of double precision", "pdgemm/matrix/residual.py",
        "dtypes.eps(C.dtype) / 2 if C.dtype in dtypes.NARROW else 0.0", "0.0",
        (f"1 {R}matrix/test_residual.py {R}matrix/test_views.py",),
    ),
    Mutant(
        "movers: a message holds so many words, not bytes", "pdgemm/transport/movers/shift.py",
        "words = LARGEST_MESSAGE_BYTES // x.itemsize", "words = LARGEST_MESSAGE_BYTES // 8",
        (f"4 {R}algorithms/test_algorithms.py",),
    ),
    Mutant(
        "movers: a block is copied before its neighbour has it", "pdgemm/transport/movers/pull.py",
        "_Copied(ready, partial(", "_Copied(MPI.REQUEST_NULL, partial(",
        (f"6 {D}test_pulled_shifts.py",),
    ),
    Mutant(
        "movers: a block is overwritten before it has left", "pdgemm/transport/movers/pipeline.py",
        "        self._transfers.wait(self._leaving[self._turn])\n", "",
        (f"6 {D}test_pulled_shifts.py",),
    ),
    Mutant(
        "movers: what is not contiguous is added to nothing", "pdgemm/transport/block_copy.py",
        "kept = y[:, here]", "kept = np.zeros_like(y[:, here])",
        (f"4 {R}algorithms/test_redistribute.py {R}algorithms/test_any_problem.py",),
    ),
    Mutant(
        "algorithms: what is converted is not conjugated", "pdgemm/algorithms/products/accumulator.py",
        "Combine(conjugated=layout.conjugated, through", "Combine(through",
        (f"1 {R}algorithms/test_algorithms.py",),
    ),
    Mutant(
        "slices: the last slice of A is not multiplied", "pdgemm/local/blas/slices.py",
        "min(level, how.slices)  # i, while j falls", "min(level, how.slices - 1)  # i, while j falls",
        (f"1 {R}algorithms/test_emulated.py",),
    ),
    Mutant(
        "slices: rows are scaled by the largest element of another row", "pdgemm/local/blas/slices.py",
        "np.frexp(np.abs(rest).max(axis=1))[1]", "np.frexp(np.abs(rest).max(axis=1)[::-1])[1]",
        (f"1 {R}algorithms/test_emulated.py",),
    ),
    Mutant(
        "slices: products of slices are added up in float32", "pdgemm/schedules/products/product.py",
        '"sums of slices": (most, how.sums_dtype)', '"sums of slices": (most, np.dtype(np.float32))',
        (f"1 {R}algorithms/test_emulated.py",),
    ),
    Mutant(
        "slices: panels are wider than float32 adds up exactly", "pdgemm/local/arrays/emulation.py",
        "_EXACT // 4 ** (self.bits - 1) // self.slices", "_EXACT // 4 ** (self.bits - 1)",
        (f"1 {R}algorithms/test_emulated.py",),
    ),
    Mutant(
        "slices: infinity is cut into slices", "pdgemm/algorithms/products/accumulator.py",
        "if not (finite(A, self.plan.accumulate) and finite(B, self.plan.accumulate)):", "if not finite(A, A.dtype):",
        (f"1 {R}algorithms/test_emulated.py",),
    ),
    Mutant(
        "slices: bfloat16 has 7 bits", "pdgemm/local/blas/slices.py",
        "_BFLOAT16 = np.uint32(0xFFFF0000)", "_BFLOAT16 = np.uint32(0xFFFE0000)",
        (f"1 {R}algorithms/test_emulated.py",),
    ),
    Mutant(
        "protection: small elements beside large ones have all their digits",
        "pdgemm/algorithms/protection/row_checksums.py",
        "norms = norms + self._of_largest *", "norms = norms + 0 *",
        (f"1 {R}algorithms/test_emulated.py",),
    ),
    Mutant(
        "verify: a tolerance near 1 is ok", "pdgemm/tools/cli/linalg_job.py",
        "return self.value <= self.bound <= TELLS", "return self.value <= self.bound",
        ("1 tests/cli/test_verified.py",),
    ),
    Mutant(
        "verify: eigenvalues are those of the triangle that was read", "pdgemm/tools/cli/linalg_job.py",
        "return hermitian(Work(\"verify\"), H) if alone else A", "return hermitian(Work(\"verify\"), H)",
        ("1 tests/cli/test_verified.py",),
    ),
    Mutant(
        "verify: a result that was finished before is not compared", "io/streamed/multiply_files.py",
        "complete=not residual.wrong", "complete=True",
        ("1 tests/cli/test_verified.py",),
    ),
    Mutant(
        "verify: zeros in place of C pass where the bound is large", "pdgemm/matrix/residual.py",
        "return not self.wrong and tells", "return not self.wrong",
        (f"1 {R}matrix/test_residual.py",),
    ),
    Mutant(
        "verify: errors of all elements of a row add up", "pdgemm/matrix/residual.py",
        "_UNLIKELY = 8", "_UNLIKELY = 1e9",
        (f"1 {R}matrix/test_residual.py",),
    ),
    Mutant(
        "verify: a sum that overflows explains any error", "pdgemm/matrix/residual.py",
        "(left + own, right + scale)", "(left, right)",
        (f"1 {R}matrix/test_residual.py",),
    ),
    Mutant(
        "verify: small elements beside large ones have all their digits", "pdgemm/matrix/residual.py",
        "size = size + k * rounded / bound *", "size = size + 0 *",
        (f"1 {R}algorithms/test_emulated.py",),
    ),
    Mutant(
        "blas: what lies behind int8 operands is multiplied", "pdgemm/local/blas/local_gemm.py",
        "scale(0, left[:, k:])", "scale(1, left[:, k:])",
        (f"1 {D}test_cuda_layer.py",),
    ),
    Mutant(
        "algorithms: B goes around Cannon's torus the other way", "pdgemm/algorithms/products/cannon.py",
        "up.start((i - 1) % pr, (i + 1) % pr,", "up.start((i + 1) % pr, (i - 1) % pr,",
        (f"9 {R}algorithms/test_algorithms.py",),
    ),
    Mutant(
        "algorithms: parts of several owners are staged at one place", "pdgemm/algorithms/products/summa.py",
        "self._bring(there, owner, slot, self._rows * (at - cols.size))", "self._bring(there, owner, slot, 0)",
        (f"4 {D}test_device.py {D}test_planted_races.py",),
    ),
    Mutant(
        "gemm: a product of transposes is stored by rows", "pdgemm/algorithms/product_options.py",
        'order: Order = "F" if all(', 'order: Order = "C" if all(',
        (f"4 {R}matrix/test_views.py {R}algorithms/test_summa.py {R}matrix/test_matrix.py",),
    ),
    Mutant(
        "epilogue: it is applied before the last sum", "pdgemm/algorithms/prepared.py",
        "        self._multiplied(beta, start, progress, agreed)\n        return self._end.end()",
        "        result = self._end.end()\n        self._multiplied(beta, start, progress, agreed)\n"
        "        return result",
        (f"4 {R}algorithms/test_epilogue.py",),
    ),
    Mutant(
        "epilogue: it is applied once for each layer", "pdgemm/algorithms/epilogue.py",
        "            Finish(epilogue.activation",
        "            for _ in range(report().layers):\n                Finish(epilogue.activation",
        (f"4 {R}algorithms/test_epilogue.py",),
    ),
    Mutant(
        "epilogue: sums are rounded to the type of C first", "pdgemm/planning/product_plan.py",
        "return C if ending and ending.dtype != C.dtype else None", "return None",
        (f"4 {R}algorithms/test_epilogue.py",),
    ),
    Mutant(
        "epilogue: what the activation takes is kept after it", "pdgemm/local/arrays/activations.py",
        "            if f:\n                f.value(z, out)\n                z = out\n",
        "            if f:\n                f.value(z, out)\n                z = out\n"
        "                if self.aux is not None:\n                    np.copyto(self.aux, z, casting=\"unsafe\")\n",
        (f"4 {R}algorithms/test_epilogue.py",),
    ),
    Mutant(
        "epilogue: every row of the grid gets the bias of the first one's columns", "pdgemm/planning/ending.py",
        "Distribution(BlockCyclic.even(copies, copies), C.distribution.cols)",
        "Distribution(BlockCyclic.even(copies, copies), x.distribution.cols.over(C.distribution.cols.parts))",
        (f"4 {R}algorithms/test_epilogue.py",),
    ),
    Mutant(
        "batched: items as large as a chunk have no room", "pdgemm/batched.py",
        "max(0 if self.alike else need.max(initial=0), min(CHUNK_BYTES, need.sum()))",
        "min(CHUNK_BYTES, need.sum())",
        (f"1 {R}algorithms/test_batched.py",),
    ),
    Mutant(
        "grouped: rows return in the order in which they arrived", "pdgemm/algorithms/indexing/routing.py",
        "False): IndexPairs(places, self._chosen),", "False): IndexPairs(places, np.sort(self._chosen)),",
        (f"1 {R}algorithms/test_grouped.py",),
    ),
    Mutant(
        "grouped: the first row of a group is counted twice", "pdgemm/algorithms/indexing/routing.py",
        "minlength=len(owner))", "minlength=len(owner)) + (np.arange(len(owner)) == 0)",
        (f"1 {R}algorithms/test_grouped.py",),
    ),
    Mutant(
        "grouped: a group without rows shifts the groups behind it", "pdgemm/algorithms/indexing/routing.py",
        "ends = np.cumsum([0, *self.sizes[", "ends = np.cumsum([0, *np.maximum(1, self.sizes)[",
        (f"1 {R}algorithms/test_grouped.py",),
    ),
    Mutant(
        "grouped: rows return by the plan by which they came", "pdgemm/algorithms/indexing/routing.py",
        "self.grid), inward, pairs,", "self.grid), pairs,",
        (f"1 {R}algorithms/test_grouped.py",),
    ),
    Mutant(
        "grouped: a row without a group keeps its elements", "pdgemm/algorithms/indexing/routing.py",
        "if not len(local) or beta == 1", "if not len(local) or beta == 0",
        (f"1 {R}algorithms/test_grouped.py",),
    ),
    Mutant(
        "factors: the other factor of a product is not conjugated", "pdgemm/linalg/factors/rank_k.py",
        "right = right.H if self.hermitian else right.T", "right = right.T",
        (f"1 {R}linalg/test_linalg_rank_k.py",),
    ),
    Mutant(
        "factors: both triangles of a result are written", "pdgemm/linalg/factors/rank_k.py",
        "protect=None, triangle=uplo)", 'protect=None, triangle="")',
        (f"4 {R}linalg/test_linalg_rank_k.py",),
    ),
    Mutant(
        "factors: the solution of a transpose is permuted the other way", "pdgemm/linalg/factors/lu.py",
        "X = steps.did(permuted(X, np.argsort(factors.perm)))", "X = steps.did(permuted(X, factors.perm))",
        (f"1 {R}linalg/test_linalg_solve.py",),
    ),
    Mutant(
        "factors: a refined solution is the first one", "pdgemm/linalg/factors/solve.py",
        "            X += corrected(R)", "            corrected(R)",
        (f"1 {R}linalg/test_linalg_solve.py",),
    ),
    Mutant(
        "factors: a band is not symmetric", "pdgemm/algorithms/pivoted/aasen_panels.py",
        "T[:w] = top / 2 + self._transposed(top) / 2", "T[:w] = top / 2 + top.T / 2",
        (f"1 {R}linalg/test_linalg_ldl.py",),
    ),
    Mutant(
        "factors: rows of L T stay where they are when others move", "pdgemm/algorithms/pivoted/aasen_panels.py",
        "(self._A, self._L[:, :known], self._G[:, :known])", "(self._A, self._L[:, :known])",
        (f"1 {R}linalg/test_linalg_ldl.py",),
    ),
    Mutant(
        "factors: no sketch is drawn again", "pdgemm/algorithms/pivoted/pivoted_panels.py",
        "if not sizes.min() > np.sqrt(dtypes.eps(R.dtype)) * self._largest:", "if False:",
        (f"1 {R}linalg/test_linalg_pivoted_qr.py",),
    ),
    Mutant(
        "factors: columns of the sketch stay where they are when others move",
        "pdgemm/algorithms/pivoted/pivoted_panels.py",
        "Y.T[moves.targets] = Y.T[moves.sources]", "pass",
        (f"1 {R}linalg/test_linalg_pivoted_qr.py",),
    ),
    Mutant(
        "factors: inertia counts what rounding leaves of zeros", "pdgemm/linalg/factors/ldl.py",
        "least = n * dtypes.eps(A.dtype) * np.abs(values).max()", "least = 0.0",
        (f"1 {R}linalg/test_linalg_ldl.py",),
    ),
    Mutant(
        "panel_algorithms: CholeskyQR tries no shift", "pdgemm/algorithms/panels/cholesky_qr.py",
        "for s in (0.0, shift)[: 1 + first]:", "for s in (0.0,):",
        (f"1 {R}linalg/test_linalg_tall_qr.py",),
    ),
    Mutant(
        "panel_algorithms: a Q of any departure is right", "pdgemm/algorithms/panels/cholesky_qr.py",
        "last = departure <= NEAR", "last = departure <= NEAR or number == 2",
        (f"1 {R}linalg/test_linalg_tall_qr.py",),
    ),
    Mutant(
        "panel_algorithms: rows of X are read before they are solved", "pdgemm/algorithms/panels/triangular_panels.py",
        "rows, slot, PANEL, ready=not plan.solves)", "rows, slot, PANEL, ready=True)",
        (f"4 {R}linalg/test_linalg_late_ranks.py",),
    ),
    Mutant(
        "panel_algorithms: products do not wait for a triangle", "pdgemm/algorithms/panels/triangular_panels.py",
        "if self._plan.A.conjugated else CONVERT)(here, there)\n        self._task.copied()",
        "if self._plan.A.conjugated else CONVERT)(here, there)",
        (f"4 {D}test_device_panels.py",),
    ),
    Mutant(
        "panel_schedules: rows that change places twice do so once", "pdgemm/schedules/panels/row_moves.py",
        "lying[here], lying[there] = lying[there], lying[here]", "lying[here], lying[there] = there, lying[here]",
        (f"0 {U}schedules/test_panel_schedules.py", f"4 {R}linalg/test_linalg_lu.py"),
    ),
    Mutant(
        "transport: after an exception the device still writes to C", "pdgemm/transport/packed_exchange.py",
        "if not all(map(_is_idle, used))", "if False",
        ("1 tests/device/test_device.py",),
    ),
    Mutant(
        "panel_movers: a panel is rewritten while it is read", "pdgemm/transport/panels/gathered_panel.py",
        "        task.wait(slot)", "        pass",
        (f"4 {R}linalg/test_linalg_late_ranks.py", f"4 {R}linalg/test_linalg_lu.py"),
    ),
    Mutant(
        "spectral: a sign's trace counts the eigenvalues below", "pdgemm/linalg/eigen/division.py",
        "count = round((n + trace) / 2)", "trace = -trace\n        count = round((n + trace) / 2)",
        (f"1 {R}linalg/test_linalg_functions.py",),
    ),
    Mutant(
        "spectral: a restart keeps the smallest singular values", "pdgemm/linalg/singular/golub_kahan.py",
        "distributed(X, vectors[:, :used])", "distributed(X, vectors[:, -used:])",
        (f"1 {R}eigen/test_linalg_svd.py",),
    ),
    Mutant(
        "spectral: the bound of singular values forgets those after the k-th", "pdgemm/linalg/singular/golub_kahan.py",
        "rest = min(rest, float(s[k] + residuals[k]))", "rest = 0.0",
        (f"1 {R}eigen/test_linalg_svd.py",),
    ),
    Mutant(
        "linalg: results of scaled operands are not scaled back", "pdgemm/linalg/ranges.py",
        "return back(result, *exponents.values())", "return result",
        (f"1 {R}linalg/test_linalg_ranges.py",),
    ),
    Mutant(
        "linalg: rows that lie far apart are not scaled", "pdgemm/linalg/ranges.py",
        "return not (low <=", "return False and not (low <=",
        (f"1 {R}linalg/test_linalg_equilibrated.py",),
    ),
    Mutant(
        "linalg: matrices of few elements are scaled by the largest ones alone", "pdgemm/linalg/ranges.py",
        "if size > least else 0.0", "if size > least * 1e99 else 0.0",
        (f"1 {R}linalg/test_linalg_equilibrated.py",),
    ),
    Mutant(
        "linalg: all columns of a right-hand side have one power", "pdgemm/linalg/ranges.py",
        "largest = _rounded(logs.max(axis=0)", "largest = 0 * _rounded(logs.max(axis=0)",
        (f"1 {R}linalg/test_linalg_equilibrated.py",),
    ),
    Mutant(
        "factors: a determinant of what underflowed is 0", "pdgemm/linalg/factors/lu.py",
        "if multiplier * least < np.finfo", "if 0 * least > np.finfo",
        (f"1 {R}linalg/test_linalg_equilibrated.py",),
    ),
    Mutant(
        "factors: the columns in which an inverse is smallest are taken", "pdgemm/linalg/factors/condition.py",
        "np.argsort(-np.abs(y)", "np.argsort(np.abs(y)",
        (f"1 {R}linalg/test_linalg_condition.py",),
    ),
    Mutant(
        "indexing: of a row that is set twice, the first value stays", "pdgemm/local/arrays/keys.py",
        "np.unique(indices[::-1], return_index=True)\n    return np.sort(len(indices) - 1 - from_end)",
        "np.unique(indices, return_index=True)\n    return np.sort(from_end)",
        (f"1 {R}algorithms/test_selection.py",),
    ),
    Mutant(
        "movers: rows in any order are copied as if they followed each other", "pdgemm/transport/block_copy.py",
        "side_by_side = bool((np.diff(here) == 1).all())", "side_by_side = here[-1] - here[0] + 1 == len(here)",
        (f"4 {R}algorithms/test_selection.py",),
    ),
    Mutant(
        "statistics: equal elements are not dealt among the ranks", "pdgemm/algorithms/statistics/columns.py",
        "comm.Exscan(equal, earlier)", "earlier[:] = 0",
        (f"4 {R}algorithms/test_statistics.py",),
    ),
    Mutant(
        "scalapack: a singular matrix has a solution", "pdgemm/interop/scalapack/lapack.py",
        "if nrhs and not factors.zero_pivot:", "if nrhs:",
        (f"4 {R}interop/test_scalapack_linalg.py",),
    ),
    Mutant(
        "calibrate: functions of layers first allocate in their turns", "pdgemm/tools/calibrate/functions.py",
        "for work in works.values():\n            work()", "pass",
        (f"2 {R}planning/test_calibrate.py",),
    ),
    Mutant(
        "calibrate: seconds of a word are taken for those of a byte", "pdgemm/tools/calibrate/links.py",
        "(large - small) / (words * 8)", "(large - small) / words",
        (f"1 {R}planning/test_calibrate.py",),
    ),
    Mutant(
        "scalapack: the conjugate transpose is the transpose", "pdgemm/interop/scalapack/pblas.py",
        'redistribute(A.H if routine.endswith("C") else A.T, C,', "redistribute(A.T, C,",
        (f"4 {R}interop/test_scalapack.py",),
    ),
    Mutant(
        "io: real and imaginary part have one weight", "pdgemm/algorithms/protection/checksum.py",
        "cols[:, None] * words + np.arange(words)", "cols[:, None] * words + 0 * np.arange(words)",
        ("1 tests/io/test_hdf5.py",),
    ),
    Mutant(
        "io: a rank's share begins where the one before it does", "io/pieces.py",
        "first + dim.block * part if dim.count(part) else first", "first + dim.block * max(0, part - 1)",
        ("4 tests/io/test_hdf5.py",),
    ),
    Mutant(
        "profiling: clocks run at one rate", "pdgemm/tools/profiling/trace_file.py",
        "(t - before.here) * rate", "(t - before.here)",
        ("4 tests/cli/test_trace.py",),
    ),
    Mutant(
        "training studies: weak efficiency is that of the same work", "pdgemm/tools/studies/records.py",
        "(other.flops / (other", "(first.flops / (other",
        ("0 tests/studies/test_training_study.py",),
    ),
    Mutant(
        "training studies: the formula of words is what was counted", "pdgemm/parallel/step_report.py",
        "words_received, formulas.get(kind)) for kind in kinds}", "words_received,) * 2 for kind in kinds}",
        ("0 tests/studies/test_training_study.py",),
    ),
    Mutant(
        "training studies: words are compared with themselves", "pdgemm/tools/studies/training/measured_training.py",
        "sum(moved != expected for", "sum(moved != moved for",
        ("0 tests/studies/test_training_study.py",),
    ),
    Mutant(
        "training studies: tokens/s of a microbatch", "pdgemm/tools/studies/training/measured_training.py",
        "case.tokens / median", "plan.layout.microbatch * case.sequence / median",
        ("0 tests/studies/test_training_study.py",),
    ),
    Mutant(
        "training studies: a report's tokens/s of a microbatch", "pdgemm/tools/studies/training/training_curves.py",
        "self.case.tokens / self.seconds", "self.case.tokens / self.training.microbatches / self.seconds",
        ("0 tests/studies/test_training_study.py",),
    ),
    Mutant(
        "training studies: the step that warms up is counted", "pdgemm/tools/studies/training/measured_training.py",
        "if len(losses) == case.warmup:", "if not losses:",
        ("0 tests/studies/test_training_study.py",),
    ),
    Mutant(
        "training studies: losses that differ agree", "pdgemm/tools/studies/training/training_curves.py",
        "if largest <= bound:", "if largest <= 1:",
        ("0 tests/studies/test_training_study.py",),
    ),
    Mutant(
        "training studies: waits of passes are no transfers", "pdgemm/tools/studies/training/training_curves.py",
        "sum(waits.values()) + phases", "phases",
        ("0 tests/studies/test_training_study.py",),
    ),
    Mutant(
        "training studies: weak ones keep the samples", "pdgemm/tools/studies/training/training_cases.py",
        'samples = batch * (number if kind == "weak" else 1)', "samples = batch",
        ("0 tests/studies/test_training_study.py",),
    ),
    Mutant(
        "studies: waits for ranks are counted twice", "pdgemm/tools/studies/curves.py",
        "max(0.0, ranks.wait_seconds.mean - sync)", "ranks.wait_seconds.mean",
        ("0 tests/studies/test_plot.py",),
    ),
    Mutant(
        "cli: some ranks end with another exit code", "pdgemm/tools/cli/job.py",
        "return self._world.allreduce(code, MPI.MAX)", "return self._world.allreduce(code, MPI.MIN)",
        ("0 tests/cli/test_cli.py",),
    ),
    Mutant(
        "streamed: a panel is read over the one in use", "io/streamed/file_panels.py",
        "        self._buffers.reverse()\n", "",
        ("4 tests/io/test_files_product.py",),
    ),
    Mutant(
        "streamed: a tile is formed over one that is not written yet", "io/streamed/files_product.py",
        "                    out.end(slab)\n                    if entry", "                    if entry",
        ("4 tests/io/test_files_product.py",),
    ),
    Mutant(
        "streamed: a panel that is there is read again", "io/streamed/tiling.py",
        "down, number = number % 2 == 0, number + 1", "down, number = True, number + 1",
        (f"0 {U}test_tilings.py",),
    ),
    Mutant(
        "plans: panels of a pair that ends early are numbered as if it went on", "pdgemm/schedules/node_relay.py",
        "before += len(left) * (end - start)", "before += len(pairs) * (end - start)",
        (f"0 {U}planning/test_little_memory.py",),
    ),
    Mutant(
        "plans: a gap between two panels counts as one inside of a panel", "pdgemm/schedules/steps.py",
        "        if any(total * -(-gap * panels // total) // panels != gap for gap in map(int, gaps)):",
        "        if len(gaps):",
        (f"0 {U}planning/test_little_memory.py",),
    ),
    Mutant(
        "streamed: a job that goes on forgets the sums of its tile", "io/streamed/files_product.py",
        "transfer_part(sums[part.file], C[rows, :], start, self.held.itemsize)", "C[rows, :].local.nbytes",
        ("4 tests/io/test_checkpoints.py",),
    ),
    Mutant(
        "protection: high bits of elements cancel in a checksum", "pdgemm/algorithms/protection/checksum.py",
        "(bits ^ bits >> np.uint64(32)) @ v", "bits @ v",
        ("1 tests/io/test_hdf5.py",),
    ),
    Mutant(
        "streamed: what a killed job left is not compared with its checksum", "io/streamed/unfinished.py",
        "    return checksum.text(comm, total) == checksum.as_text(left.total)", "    return True",
        ("4 tests/io/test_checkpoints.py",),
    ),
    Mutant(
        "streamed: C in place is computed twice", "io/streamed/unfinished.py",
        "        raise Complete\n", "        pass\n",
        ("4 tests/io/test_checkpoints.py",),
    ),
    Mutant(
        "streamed: other inputs are gone on with", "io/streamed/unfinished.py",
        "return checksum.text(comm, total) == checksum.as_text(left.read[number])", "return True",
        ("4 tests/io/test_checkpoints.py",),
    ),
    Mutant(
        "streamed: other datasets of a file that has not changed are gone on with", "io/streamed/unfinished.py",
        'return {"name": _path(x.dataset[1]), "files"', 'return {"name": "", "files"',
        ("4 tests/io/test_checkpoints.py",),
    ),
    Mutant(
        "support: a file whose time was put back has not changed", "pdgemm/support/file_states.py",
        "status.st_mtime_ns, status.st_ctime_ns)", "status.st_mtime_ns, 0)",
        ("0 tests/io/test_outputs.py", "1 tests/io/test_checkpoints.py"),
    ),
    Mutant(
        "streamed: checkpoints of two datasets share a name", "io/streamed/unfinished.py",
        'lambda x: f"%{ord(x[0]):02X}"', 'lambda x: "."',
        ("1 tests/io/test_checkpoints.py",),
    ),
    Mutant(
        "io: what describes a dataset is not read back from the disk", "io/new_dataset.py",
        "        on_root(self._comm, self._path, self.check_held)\n", "        pass\n",
        ("1 tests/io/test_hdf5.py",),
    ),
    Mutant(
        "interchange: a part of a row goes on in the next row of another window", "io/safetensors/windows.py",
        "cols = min(self.width - col, len", "cols = min(self.width, len",
        (f"4 {R}parallel/test_whole_parameters.py",),
    ),
    Mutant(
        "interchange: the columns of a window begin at its index, not at its elements", "io/safetensors/windows.py",
        "return Place(row, own.start * inner,", "return Place(row, own.start,",
        (f"4 {R}parallel/test_whole_parameters.py",),
    ),
    Mutant(
        "interchange: what was written is not compared", "io/safetensors/windows.py",
        "if not np.array_equal(block.view", "if False and not np.array_equal(block.view",
        (f"4 {R}parallel/test_whole_parameters.py",),
    ),
    Mutant(
        "interchange: a transposed matrix has the columns of the parameter", "io/safetensors/windows.py",
        "shape[0] if place.transposed else place.cols", "place.cols",
        (f"4 {R}parallel/test_whole_parameters.py",),
    ),
    Mutant(
        "interchange: elements of a file are not aligned", "io/safetensors/header.py",
        "(-item[1].dtype.itemsize, item[0])", "(item[1].dtype.itemsize, item[0])",
        ("4 tests/io/test_safetensors.py",),
    ),
    Mutant(
        "interchange: a header is not padded", "io/safetensors/header.py",
        'text += b" " * (-len(text) % 8)', "pass",
        ("4 tests/io/test_safetensors.py",),
    ),
    Mutant(
        "interchange: a damaged header is published", "io/safetensors/matrices.py",
        "        on_root(comm, path, lambda: new.check(path, partial))\n", "",
        ("4 tests/io/test_safetensors.py",),
    ),
    Mutant(
        "interchange: the lowest rank of a window alone writes its part", "pdgemm/parallel/states/whole_parameters.py",
        "return min(line) in division.owners", "return buckets.mesh.rank in division.owners",
        (f"4 {R}parallel/test_whole_parameters.py",),
    ),
    Mutant(
        "interchange: wide exports are rounded parameters", "pdgemm/parallel/states/whole_parameters.py",
        "if kind == layout.dtype else storage.own_masters(bucket)", "if True else storage.own_masters(bucket)",
        (f"4 {R}parallel/test_whole_parameters.py",),
    ),
    Mutant(
        "interchange: each rank writes the first part of a bucket of stage 0",
        "pdgemm/parallel/states/whole_parameters.py",
        "first = layout.part(bucket, line.index).start - storage.span(bucket).start", "first = 0",
        (f"4 {R}parallel/test_whole_parameters.py",),
    ),
    Mutant(
        "interchange: numbers are rounded without a word", "pdgemm/parallel/states/whole_parameters.py",
        "elif not convert and not", "elif False and not",
        (f"4 {R}parallel/test_whole_parameters.py",),
    ),
    Mutant(
        "interchange: a rank may have other matrices transposed", "pdgemm/parallel/states/whole_parameters.py",
        "*there.items(), [*turned.values()]]", "*there.items()]",
        (f"4 {R}parallel/test_whole_parameters.py",),
    ),
    Mutant(
        "interchange: tensors that no parameter has are overlooked", "pdgemm/parallel/states/whole_parameters.py",
        "and not here\" for name in extra] if strict else []", "and not here\" for name in extra] if False else []",
        (f"4 {R}parallel/test_whole_parameters.py",),
    ),
    Mutant(
        "interchange: a gradient that torch has elsewhere is not added", "docs/examples/torch_buckets.py",
        "        own += np.from_dlpack(p.grad)\n", "",
        ("2 tests/examples/test_torch_buckets.py",),
    ),
    Mutant(
        "interchange: hooks do not say that a gradient is complete", "docs/examples/torch_buckets.py",
        "    buckets.ready(name)\n", "",
        ("2 tests/examples/test_torch_buckets.py",),
    ),
    Mutant(
        "io: small matrices that were lost on the way are published", "io/many_datasets.py",
        "if texts(self._comm, totals) != recorded:", "if False:",
        ("4 tests/io/test_many_matrices.py",),
    ),
    Mutant(
        "io: a dataset without its metadata is published with the others", "io/many_datasets.py",
        "if there != self.offsets or self._file", "if self._file",
        ("1 tests/io/test_many_matrices.py",),
    ),
    Mutant(
        "io: the parts of a small matrix lie as on their ranks", "io/pieces.py",
        "(dim.indices(part) for dim, part in dims)", "(np.arange(dim.count(part)) for dim, part in dims)",
        ("4 tests/io/test_many_matrices.py",),
    ),
    Mutant(
        "io: each small matrix is exchanged alone", "io/pieces.py",
        "most[0] > ranks * ELEMENTS", "most[0] > more[0]",
        ("4 tests/io/test_many_matrices.py",),
    ),
    Mutant(
        "io: what cannot be read now is taken for damaged", "io/generations.py",
        "            if isinstance(bad, OSError) and bad.errno:  # it may be", "            if False:  # it may be",
        ("4 tests/io/test_checkpoints.py",),
    ),
    Mutant(
        "support: a failure wakes nobody", "pdgemm/support/failures.py",
        "for comm in _known if _patience[0] else ():", "for comm in ():",
        ("0 tests/cli/test_survivors.py",),
    ),
    Mutant(
        "schedules: a rank sends its own array in place of an inherited one",
        "pdgemm/schedules/exchanges/inherited_exchange.py",
        "self.held(holder).index(old))", "0)",
        (f"4 {R}support/test_resilience.py",),
    ),
    Mutant(
        "resilience: memory that nobody shares is read", "pdgemm/resilience/kept_state.py",
        "all(at[0] for rank in mine for at in self._places[rank])", "True",
        ("0 tests/cli/test_survivors.py",),
    ),
    Mutant(
        "resilience: a step counts where it ended on this rank", "pdgemm/resilience/survivors.py",
        "return state if agreed & _DONE else None", "return state",
        ("0 tests/cli/test_survivors.py",),
    ),
    Mutant(
        "resilience: a step may change the state", "pdgemm/resilience/kept_state.py",
        "                x.flags.writeable = False\n", "                pass\n",
        (f"4 {R}support/test_resilience.py",),
    ),
    Mutant(
        "protection: no residual is ever large", "pdgemm/algorithms/protection/row_checksums.py",
        "(ratio > limit).any(), (ratio > CAP).any()", "False, False",
        ("4 tests/ranks/algorithms/test_protection.py",),
    ),
    Mutant(
        "protection: B x is made of C's part alone", "pdgemm/algorithms/protection/row_checksums.py",
        "            self._allreduce(whole)\n", "",
        ("4 tests/ranks/algorithms/test_protection.py",),
    ),
    Mutant(
        "protection: an operand that changed is not told from a wrong product",
        "pdgemm/algorithms/protection/row_checksums.py",
        'return ", ".join(texts)', 'return ""',
        ("4 tests/ranks/algorithms/test_protection.py",),
    ),
    Mutant(
        "protection: a product in place is repeated from what it has become",
        "pdgemm/algorithms/protection/repetition.py",
        "            C.stored[...] = entry\n", "            pass\n",
        ("4 tests/ranks/algorithms/test_protection.py",),
    ),
    Mutant(
        "protection: rows that hold NaN by right are taken for wrong", "pdgemm/algorithms/protection/row_checksums.py",
        "unknown = ~np.isfinite(tau)", "unknown = np.zeros(len(ratio), bool)",
        ("4 tests/ranks/algorithms/test_protection.py",),
    ),
    Mutant(
        "protection: signs alone are the weights of columns", "pdgemm/algorithms/protection/row_checksums.py",
        "return signs * (1.0 + (bits", "return signs + 0 * (1.0 + (bits",
        ("1 tests/ranks/algorithms/test_protection_rows.py",),
    ),
    Mutant(
        "protection: norms of small rows are lost in their squares", "pdgemm/algorithms/protection/row_checksums.py",
        "    if scaled.any():\n", "    norms[norms == 0] = np.inf\n    if False:\n",
        ("1 tests/ranks/algorithms/test_protection_rows.py",),
    ),
    Mutant(
        "protection: a flip is named where the repetition has the same bits",
        "pdgemm/algorithms/protection/repetition.py",
        "(bits != before, node())", "(True, node())",
        ("1 tests/ranks/algorithms/test_protection_rows.py",),
    ),
    Mutant(
        "io: a job that was killed replaces what a later one saved", "io/generations.py",
        "if there is not None and last is not None and there.token.job not in (_myself, last.job):", "if False:",
        ("4 tests/io/test_state.py",),
    ),
    Mutant(
        "matrix: arrays that differ among the ranks become one matrix", "pdgemm/matrix/constructors.py",
        "if check and grid.size > 1:", "if check and grid.size > 99:",
        (f"4 {R}matrix/test_arguments.py",),
    ),
    Mutant(
        "io: the one writer writes the blocks of all ranks to the first columns", "io/hyperslabs.py",
        "put(first, second, some)", "put(first, 0, some)",
        ("4 tests/io/test_hdf5.py",),
    ),
    Mutant(
        "support: the data of another program is replaced without a word", "pdgemm/support/files.py",
        "    if not (ours or overwrite):", "    if False:",
        ("1 tests/io/test_replaced.py",),
    ),
    Mutant(
        "support: a rename that a storage drops is believed", "pdgemm/support/files.py",
        "    check_named(new, before)\n", "    assert before\n",
        ("1 tests/io/test_replaced.py",),
    ),
    Mutant(
        "io: a dataset is to be saved below another one", "io/stored.py",
        "if not isinstance(file.get(above), h5py.Group):", "if False:",
        ("1 tests/io/test_replaced.py",),
    ),
    Mutant(
        "io: an older generation goes where a storage drops its second name", "io/generations.py",
        "    check_named(name, state(path))\n", "    pass\n",
        ("1 tests/io/test_replaced.py",),
    ),
    Mutant(
        "io: the list of matrices is not part of what is hashed", "io/generations.py",
        "good = attrs.pop(_CONTENTS) == _hash(attrs, matrices)", "good = attrs.pop(_CONTENTS) is not None",
        ("1 tests/io/test_state.py",),
    ),
    Mutant(
        "io: a damaged generation keeps its job from saving", "io/generations.py",
        "    elif not _is_ours(path):\n", "    elif True:\n",
        ("1 tests/io/test_state.py",),
    ),
    Mutant(
        "io: a damaged generation is loaded", "io/hdf5.py",
        "load(each.path, name, grid, verify=True,", "load(each.path, name, grid, verify=False,",
        ("1 tests/io/test_many_matrices.py",),
    ),
    Mutant(
        "io: many matrices are not compared with their checksums", "io/many_datasets.py",
        '        check_checksum(dataset, f"{path}:{name}", computed)\n', "        pass\n",
        ("4 tests/io/test_state.py",),
    ),
    Mutant(
        "io: a file is opened for each matrix that is inspected", "io/many_datasets.py",
        "lambda: stored_datasets(path, names))", "lambda: {x: stored_datasets(path, [x])[x] for x in names})",
        ("1 tests/io/test_many_matrices.py",),
    ),
    Mutant(
        "io: many matrices have the types of their datasets", "io/many_datasets.py",
        "x.astype(dtype, copy=False)", "x.astype(x.dtype, copy=False)",
        ("1 tests/io/test_many_matrices.py",),
    ),
    Mutant(
        "io: chunks of a dataset are taken for its rows", "io/many_datasets.py",
        "if x.offset is not None or 0 in x.shape}", "if x.shape}",
        ("1 tests/io/test_many_matrices.py",),
    ),
    Mutant(
        "io: matrices and attributes of two generations are loaded together", "io/hdf5.py",
        "if not on_root(comm, path, lambda: generations.is_there(each)):", "if False:",
        ("4 tests/io/test_state.py",),
    ),
    Mutant(
        "io: ranks wait for the elements of one that lacks memory", "io/hyperslabs.py",
        "        with together(comm):  # a rank that lacks", "        with nullcontext():  # a rank that lacks",
        ("4 tests/io/test_hdf5.py",),
    ),
    Mutant(
        "schedules: a redistribution is simulated without its reads", "pdgemm/schedules/exchanges/exchange.py",
        'kind = SHARED.name if self.shared else "exchange"', 'kind = "exchange"',
        ("0 tests/unit/schedules/test_exchanges.py",),
    ),
    Mutant(
        "collectives: what comes from an earlier rank is joined on the wrong side", "pdgemm/transport/collectives.py",
        "step.adds, join, source < me)", "step.adds, join, source > me)",
        (f"4 {R}transport/test_collectives.py",),
    ),
    Mutant(
        "collectives: the last step of Bruck's all-gather goes around too far",
        "pdgemm/schedules/collectives/collective_steps.py",
        "ends = at + min(distance, p - distance)", "ends = at + distance",
        (f"0 {U}schedules/test_collective_schedules.py",),
    ),
    Mutant(
        "programs: a product is not planned", "pdgemm/gemm.py",
        """        operands.A.grid.draft.add("C", plan)\n""", """        pass\n""",
        (f"4 {R}linalg/test_linalg_plans.py",),
    ),
    Mutant(
        "programs: redistributions of sums are not reported", "pdgemm/linalg/functions/iterations.py",
        "return Y if Y.later_report is before else self.did(Y)", "return Y",
        (f"4 {R}linalg/test_linalg_plans.py",),
    ),
    Mutant(
        "eigen: eigenvalues that differ in few digits are taken for one", "pdgemm/local/blas/secular.py",
        "tolerance = 4 * float(np.finfo(dtype).eps)", "tolerance = 4e4 * float(np.finfo(dtype).eps)",
        (f"1 {R}eigen/test_tridiagonal.py",),
    ),
    Mutant(
        "eigen: a column is rotated the other way", "pdgemm/local/blas/secular.py",
        "c, s = z_[q] / t, -z_[p] / t", "c, s = z_[q] / t, z_[p] / t",
        (f"1 {R}eigen/test_tridiagonal.py",),
    ),
    Mutant(
        "eigen: vectors of computed roots are those of the z before", "pdgemm/linalg/eigen/tridiagonal.py",
        "z = secular.loewner(factors.prod(axis=0), z)", "z = z / np.linalg.norm(z)",
        (f"1 {R}eigen/test_tridiagonal.py",),
    ),
    Mutant(
        "eigen: halves are joined by positive elements", "pdgemm/linalg/eigen/tridiagonal.py",
        "    z[half:] *= np.sign(e)\n", "",
        (f"1 {R}eigen/test_tridiagonal.py",),
    ),
    Mutant(
        "eigen: a subset ends before its last eigenvalue", "pdgemm/linalg/eigen/eigh.py",
        "slice(int(self.lo), int(self.hi) + 1)", "slice(int(self.lo), int(self.hi))",
        (f"1 {R}eigen/test_eigh.py",),
    ),
    Mutant(
        "eigen: block Lanczos has the last word", "pdgemm/linalg/eigen/eigh.py",
        "        if may_fail:\n", "        if False:\n",
        (f"1 {R}eigen/test_eigh.py",),
    ),
    Mutant(
        "eigen: an interval has its lower end", "pdgemm/linalg/eigen/eigh.py",
        'np.searchsorted(w, [self.lo, self.hi], side="right")', 'np.searchsorted(w, [self.lo, self.hi])',
        (f"1 {R}eigen/test_eigh.py",),
    ),
    Mutant(
        "eigen: w has the product of v and A v, not conjugated", "pdgemm/algorithms/panels/tridiagonal_panels.py",
        "(tau * norm_of_v).conjugate() / 2", "(tau * norm_of_v) / 2",
        (f"1 {R}eigen/test_one_stage.py",),
    ),
    Mutant(
        "eigen: tiny columns are reflected as others", "pdgemm/algorithms/panels/tridiagonal_panels.py",
        "if abs(beta) < self._least / self._eps:", "if False:",
        (f"1 {R}eigen/test_one_stage.py",),
    ),
    Mutant(
        "eigen: columns of a neighbour are used before they arrive", "pdgemm/algorithms/panels/bulge_chase.py",
        "        self._task.wait(slot)\n", "",
        (f"4 {R}eigen/test_two_stage.py",),
    ),
    Mutant(
        "eigen: blocks of reflections are applied to the rows above", "pdgemm/algorithms/panels/bulge_chase.py",
        "start = first + 1 + t * b", "start = first + t * b",
        (f"1 {R}eigen/test_two_stage.py",),
    ),
    Mutant(
        "singular: small singular values come from A^H A, too", "pdgemm/linalg/singular/full_svd.py",
        "int(np.count_nonzero(w <= LEAST**2 * w[0]))", "n",
        (f"4 {R}eigen/test_full_svd.py",),
    ),
    Mutant(
        "singular: columns of Q whose values are found later change signs", "pdgemm/linalg/singular/full_svd.py",
        "(diagonal < 0) & (np.arange(n) < large)", "diagonal < 0",
        (f"4 {R}eigen/test_full_svd.py",),
    ),
    Mutant(
        "factors: the transpose of a symmetric matrix is taken for its conjugate", "pdgemm/linalg/factors/ldl.py",
        'letter == ("T" if factors.hermitian else "C")', 'letter == "T"',
        (f"1 {R}linalg/test_linalg_ldl.py",),
    ),
    Mutant(
        "functions: a norm that overflows is taken for an infinite element", "pdgemm/linalg/functions/iterations.py",
        'float(A.norm("max"))', 'float(A.norm("fro"))',
        (f"1 {R}linalg/test_linalg_ranges.py",),
    ),
    Mutant(
        "functions: a modulus that overflows is taken for an infinite element", "pdgemm/linalg/functions/iterations.py",
        'if size == np.inf and A.dtype.kind == "c":', "if False:",
        (f"1 {R}linalg/test_linalg_ranges.py",),
    ),
    Mutant(
        "factors: the diagonal of R stands for its small singular values", "pdgemm/local/blas/pivots.py",
        "if small == 0 or large * self._rcond > small:", "if abs(x[k]) <= self._rcond * large:",
        (f"1 {R}linalg/test_linalg_lstsq.py",),
    ),
    Mutant(
        "singular values: no warning of one at the tolerance", "pdgemm/linalg/singular/singular_values.py",
        "unsure > 0 and least >", "False and least >",
        (f"1 {R}linalg/test_linalg_lstsq.py",),
    ),
    Mutant(
        "factors: numbers of least norm stay in the order of pivots", "pdgemm/linalg/singular/lstsq.py",
        "permuted(X, np.argsort(p))", "permuted(X, p)",
        (f"1 {R}linalg/test_linalg_lstsq.py",),
    ),
    Mutant(
        "stored: triangles keep the difference of the mean and that of the first panel", "io/streamed/stored_svd.py",
        "        file.work.product(-1, w, difference, 1, X)\n", "",
        ("1 tests/io/test_stored_svd.py",),
    ),
    Mutant(
        "stored: rows that become a triangle are lost", "io/streamed/stored_svd.py",
        "rows[: len(R)], rows[len(R) : used] = R, 0", "rows[len(R) : used] = 0",
        ("1 tests/io/test_stored_svd.py",),
    ),
    Mutant(
        "stored: sketches are not scaled when a panel is", "pdgemm/linalg/ranges.py",
        "            times(x, before - self.exponent)\n", "            pass\n",
        ("1 tests/io/test_stored_svd.py",),
    ),
    Mutant(
        "stored: passes are counted without the first one", "io/streamed/svd_plan.py",
        "2 * steps + 3", "2 * steps + 2",
        ("1 tests/io/test_stored_svd.py",),
    ),
    Mutant(
        "stored: a .npy file in Fortran order is read as its transpose", "io/source.py",
        '"T" if transposed else "N", op.upper()).turned', '"N", op.upper()).turned',
        ("0 tests/cli/test_linalg_commands.py",),
    ),
    Mutant(
        "pipelines: a backward pass is that of another microbatch", "pdgemm/parallel/pipeline_stages.py",
        "self.stage.backward(microbatch, chunk, x)",
        "self.stage.backward(self.schedule.microbatches - 1 - microbatch, chunk, x)",
        (f"1 {R}parallel/test_pipelines.py",),
    ),
    Mutant(
        "pipelines: activations of another chunk are freed", "pdgemm/parallel/pipeline_stages.py",
        "self.live.remove((microbatch, chunk))", "self.live.discard((microbatch, 0))",
        (f"4 {R}parallel/test_pipelines.py",),
    ),
    Mutant(
        "pipelines: nothing else goes on while a stage waits", "pdgemm/parallel/pipeline_stages.py",
        "self.mesh.transfers.wait(group)", "[request.Wait() for request in group]",
        (f"4 {R}parallel/test_pipelines.py",),
    ),
    Mutant(
        "pipelines: messages that are received are not counted", "pdgemm/parallel/pipeline_stages.py",
        "self.traffic.words_received += x.size", "self.traffic.words_received += 0",
        (f"4 {R}parallel/test_pipelines.py",),
    ),
    Mutant(
        "pipelines: 1f1b keeps as many microbatches as gpipe", "pdgemm/schedules/training/pipeline_orders.py",
        "_in_turns(min(stages - stage, microbatches), forward, backward)", "_in_turns(microbatches, forward, backward)",
        (f"0 {U}schedules/test_pipeline_schedules.py",),
    ),
    Mutant(
        "pipelines: weights have no gradients of a microbatch", "pdgemm/schedules/training/pipeline_orders.py",
        "range(max(0, microbatches - stage), microbatches)", "range(max(0, microbatches - stage), microbatches - 1)",
        (f"0 {U}schedules/test_pipeline_schedules.py",),
    ),
    Mutant(
        "pipelines: messages of all chunks have one tag", "pdgemm/schedules/training/pipeline_schedule.py",
        "x.microbatch * self.blocks + x.block)", "x.microbatch * self.blocks + x.target)",
        (f"0 {U}schedules/test_pipeline_schedules.py",),
    ),
    Mutant(
        "pipelines: activations of another chunk are counted as freed",
        "pdgemm/schedules/training/pipeline_schedule.py",
        "live.remove((microbatch, chunk))", "live.discard((microbatch, 0))",
        (f"0 {U}schedules/test_pipeline_schedules.py",),
    ),
    Mutant(
        "pipelines: a stage receives for its next action alone", "pdgemm/schedules/training/pipeline_timeline.py",
        "LOOKAHEAD = 2", "LOOKAHEAD = 1",
        (f"0 {U}schedules/test_pipeline_schedules.py",),
    ),
    Mutant(
        "training: a rank divides by its own samples", "pdgemm/parallel/data/prefetch.py",
        "yield StepSamples(item[0], item[1], divisor)", "yield StepSamples(item[0], item[1], item[2])",
        (f"4 {R}parallel/test_training_state.py",),
    ),
    Mutant(
        "training: samples of a file stay in ascending order", "pdgemm/parallel/data/prefetch.py",
        "np.asarray(source[ascending])[back]", "np.asarray(source[ascending])",
        (f"1 {R}parallel/test_training_state.py",),
    ),
    Mutant(
        "training: parts of a bucket lose what ranks do not divide evenly",
        "pdgemm/schedules/training/flat_layout.py",
        "bucket.words * at // self.shards", "bucket.words // self.shards * at",
        (f"0 {U}schedules/test_training_values.py",),
    ),
    Mutant(
        "training: a slot is filled before its bucket is reduced", "pdgemm/parallel/line_buckets.py",
        "                self._wait(before)\n", "                pass\n",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: the norm is that of a rank's own part", "pdgemm/parallel/buckets.py",
        "self._squared_norm(sums)", "self._squared_norm(squares)",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: squares that overflow are a norm", "pdgemm/parallel/buckets.py",
        "failures > 0 or not isfinite(total))", "failures > 0)",
        (f"4 {R}parallel/test_training_errors.py",),
    ),
    Mutant(
        "training: a product that does not fit is added", "pdgemm/parallel/buckets.py",
        "shapes[2:] not in ([], [place])", "False",
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: initial values are computed beyond the last row", "pdgemm/parallel/parts.py",
        "if span.start >= span.stop:", "if False:",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: steps that are skipped are predicted to gather parameters", "pdgemm/parallel/step_report.py",
        "sum([updates] * self._updates, Traffic())", "sum([updates] * steps, Traffic())",
        (f"4 {R}parallel/test_training_state.py",),
    ),
    Mutant(
        "training: samples from the end of a file are passed on as negative numbers",
        "pdgemm/parallel/data/prefetch.py",
        "rows = np.where(before, rows + len(source), rows)", "pass",
        (f"1 {R}parallel/test_training_state.py",),
    ),
    Mutant(
        "training: a state cannot be continued, as an attribute of it is the step",
        "pdgemm/parallel/states/training_state.py",
        "if name in (_STEP, _UPDATES,", "if name in (_UPDATES,",
        (f"1 {R}parallel/test_training_state.py",),
    ),
    Mutant(
        "muon: a home that fails leaves the others waiting", "pdgemm/parallel/updates/sharded_optimizer.py",
        "with self.buckets.mesh.raised_together():", "if True:",
        (f"2 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: what a failed update is still sent comes into the next one", "pdgemm/parallel/updates/homes.py",
        "self._buffers, self._stacks, self._wholes = {}, [], {}\n            raise", "raise",
        (f"2 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: homes differ by rank", "pdgemm/parallel/updates/homes.py",
        "tuple(map(int, self.loads.homes))",
        "tuple(int(x + self._line.rank) % self._line.size for x in self.loads.homes)",
        (f"4 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: homes are chosen in turn", "pdgemm/schedules/training/home_exchange.py",
        "homes = balance([(m, m, n) for m, n in wide], ranks)", "homes = np.arange(len(wide)) % ranks",
        (f"4 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: tall matrices are reshaped, not transposed", "pdgemm/parallel/updates/homes.py",
        "np.moveaxis(x.reshape(*others, rows), -1, 0) if tall else", "",
        (f"1 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: the update has the size of the shorter side", "pdgemm/parallel/updates/muon.py",
        "sqrt(stack.shape[2])", "sqrt(stack.shape[1])",
        (f"1 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: no Nesterov's step", "pdgemm/parallel/updates/muon.py",
        "u + momentum * m if self.nesterov else m", "m",
        (f"1 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: updates are clipped as well as gradients", "pdgemm/parallel/updates/sharded_optimizer.py",
        "if factor != 1 and not isinstance(rule, Muon):", "if factor != 1:",
        (f"1 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: gradients of matrices are not clipped", "pdgemm/parallel/updates/sharded_optimizer.py",
        "if factor != 1:\n                    part *=", "if False:\n                    part *=",
        (f"1 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: squares of small matrices vanish", "pdgemm/local/blas/orthogonal_stacks.py",
        "        x /= largest\n", "",
        (f"1 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: windows of other ranks are that of the home", "pdgemm/parallel/updates/homes.py",
        "[...] = whole[part.place]", "[...] = whole[held[self._line.rank].place]",
        (f"4 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: with copies, those of the lowest rank come to the home", "pdgemm/schedules/training/home_exchange.py",
        "key=lambda at: (abs(at - home), at)", "key=lambda at: at",
        (f"4 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: products at homes take memory that is not counted", "pdgemm/parallel/updates/homes.py",
        'self.rule.whole_updates(stack, self._buffers["work"])', "self.rule.whole_updates(stack)",
        (f"1 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: updates have the size of a rank's window", "pdgemm/parallel/updates/homes.py",
        "parts[at][...] = x\n",
        "held = exchange.held[at][self._line.rank]\n"
        "            parts[at][...] = x * (max(held.shape) / max(self._shapes[self.names[at]])) ** 0.5\n",
        (f"4 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: tied matrices come to homes", "pdgemm/parallel/updates/homes.py",
        "== 2 and not division.tied and", "== 2 and",
        (f"1 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: skipped steps are predicted to move matrices", "pdgemm/parallel/step_report.py",
        "[homes.traffic()] * self._updates", "[homes.traffic()] * steps",
        (f"4 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "muon: vectors have the state of matrices", "pdgemm/parallel/updates/sharded_optimizer.py",
        "int(self._rule_of(name) is not rule)", "0",
        (f"1 {R}parallel/test_muon.py",),
    ),
    Mutant(
        "training: what is added to a gradient of an earlier step is lost", "pdgemm/parallel/line_buckets.py",
        "if flat.view(np.bool_).any():", "if False:",
        (f"4 {R}parallel/test_training_errors.py",),
    ),
    Mutant(
        "training: a slot has the gradients of the bucket before", "pdgemm/parallel/line_buckets.py",
        "self._slots[bucket.number % FLIGHT], slot[:] = None, 0", "self._slots[bucket.number % FLIGHT] = None",
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: all lines of a mesh lie on nodes alike", "pdgemm/parallel/layout_choice.py",
        "    layouts = transport(in_place=True)\n",
        "    layouts = transport(in_place=True)\n"
        "    with together(mesh.comm) as arguments:\n        arguments += [repr(x.layout) for x in layouts.lines]\n",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "sums that overflow warn on the rank that adds", "pdgemm/transport/collectives.py",
        "# a warning may be an error, of the rank alone that adds\ndef _add_as_tree",
        "\n@np.errstate(over='warn')\ndef _add_as_tree",
        (f"4 {R}parallel/test_training_errors.py",),
    ),
    Mutant(
        "training: only the rank that overflows skips a step", "pdgemm/parallel/buckets.py",
        "failures > 0 or not isfinite(total))", "bad)",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: gradients that are missing are not told to the other ranks", "pdgemm/parallel/buckets.py",
        "_FAILED * bool(wrong or error)", "0",
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: of several microbatches the last one alone is kept", "pdgemm/parallel/line_buckets.py",
        "self.storage.own_gradients(bucket)[...] += slot", "self.storage.own_gradients(bucket)[...] = slot",
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: a partial sum of the tree stays beside the next microbatch", "pdgemm/parallel/flat_storage.py",
        "        levels[0] = 0\n", "        pass\n",
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: the scale of the loss is part of the norm that is clipped",
        "pdgemm/parallel/updates/sharded_optimizer.py",
        "norm = reduced.norm / (scale.scale if scale else 1.0)", "norm = reduced.norm",
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: parameters of 16 bits are not those of their masters",
        "pdgemm/parallel/updates/sharded_optimizer.py",
        "            parameters[:] = masters\n", "            pass\n",
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: biases are decayed", "pdgemm/parallel/updates/rule_states.py",
        "self._rule_of[name], self._decays[name]", "self._rule_of[name], True",
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: corrections of the moments begin again after a restart", "pdgemm/parallel/states/training_state.py",
        "= numbers[_STEP], numbers[_UPDATES]", "= numbers[_STEP], 0",
        (f"1 {R}parallel/test_training_state.py",),
    ),
    Mutant(
        "training: samples of an epoch's end are those of its beginning", "pdgemm/parallel/data/sampler.py",
        "shuffled(at[here] % self.count, self.count, self.seed, epoch)",
        "shuffled(at[here] % self.count, self.count, self.seed, 0)",
        (f"0 {U}schedules/test_training_values.py",),
    ),
    Mutant(
        "training: neighbours along dp have copies of experts", "pdgemm/schedules/training/mesh_shape.py",
        "COPIES: self.dp // self.ep, EXPERTS: self.ep,", "EXPERTS: self.ep, COPIES: self.dp // self.ep,",
        (f"0 {U}schedules/test_training_values.py",),
    ),
    Mutant(
        "training: gradients are those of the mean of the ranks", "pdgemm/parallel/updates/sharded_optimizer.py",
        "                g *= g.dtype.type(factor)",
        "                pass\n            g *= g.dtype.type(factor / layout.shards)",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: the last samples of a batch are nobody's", "pdgemm/parallel/data/sampler.py",
        "rows[n * at // parts : n * (at + 1) // parts]", "rows[n // parts * at : n // parts * (at + 1)]",
        (f"0 {U}schedules/test_training_values.py",),
    ),
    Mutant(
        "training: each rank has an order of samples of its own", "pdgemm/parallel/data/sampler.py",
        "rows = self.rows(step)\n", "rows = Sampler(self.count, self.batch, self.seed + index).rows(step)\n",
        (f"0 {U}schedules/test_training_values.py",),
    ),
    Mutant(
        "training: gradients are reduced before the last microbatch is added", "pdgemm/parallel/line_buckets.py",
        "if microbatch == layout.microbatches or layout.reduce_each:",
        "if microbatch == max(1, layout.microbatches - 1) or layout.reduce_each:",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: the norm is its square", "pdgemm/parallel/buckets.py",
        "Reduced(sqrt(total), ", "Reduced(total, ",
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: moments change in a step that is skipped", "pdgemm/parallel/updates/sharded_optimizer.py",
        'buckets.clear()\n            return Step(float("inf"), True)',
        'self.states[0] *= 0.9\n            buckets.clear()\n            return Step(float("inf"), True)',
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: corrections of moments count a step that is skipped", "pdgemm/parallel/updates/sharded_optimizer.py",
        'buckets.clear()\n            return Step(float("inf"), True)',
        'self.updates += 1\n            buckets.clear()\n            return Step(float("inf"), True)',
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: with stage 2 parameters of others are old ones", "pdgemm/parallel/updates/sharded_optimizer.py",
        "        if layout.stage in (1, 2):\n", "        if layout.stage == 1:\n",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: initial values of a part begin a row late", "pdgemm/parallel/parts.py",
        "start = span.start - (first * cols + columns.start)", "start = span.start - first * cols",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: a parameter of stage 3 is overwritten while it is used", "pdgemm/parallel/line_buckets.py",
        "self.divided.whole(bucket), bucket.start).copy()", "self.divided.whole(bucket), bucket.start)",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: parameters are used before they have come in", "pdgemm/parallel/line_buckets.py",
        "            if self._gathers:\n", "            if self._gathers and False:\n",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: a rank that waits for a sum stops the others", "pdgemm/parallel/mesh.py",
        "self.transfers.wait([start(self.traffic[kind])], checks.look)", "start(self.traffic[kind]).Wait()",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: sums and gradients have one message tag", "pdgemm/parallel/mesh.py",
        "self._tags = 1 + CALL  #", "self._tags = _SUMS  #",
        (f"4 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "layers: a bias is added on each rank along tp", "pdgemm/parallel/layers/linear.py",
        "return _finished(y, bias, activation, residual)",
        "return _finished(y, bias if bias is None else bias * len(self._ranks), activation, residual)",
        (f"4 {R}parallel/test_layers_linear.py",),
    ),
    Mutant(
        "layers: a residual is added on each rank along tp", "pdgemm/parallel/layers/linear.py",
        "return _finished(y, bias, activation, residual)",
        "return _finished(y, bias, activation, residual if residual is None else residual * len(self._ranks))",
        (f"4 {R}parallel/test_layers_linear.py",),
    ),
    Mutant(
        "layers: f is applied to the addends of a sum", "pdgemm/parallel/layers/linear.py",
        "            return self._line.sums(addends, s.rows), a",
        "            np.maximum(addends, 0, out=addends)\n            return self._line.sums(addends, s.rows), a",
        (f"4 {R}parallel/test_layers_linear.py",),
    ),
    Mutant(
        "layers: the gradient by X is reduced twice", "pdgemm/parallel/layers/linear.py",
        "            return self._own_sums(s, a, b), a",
        "            return self._own_sums(s, a, b) * (len(self._ranks) if step == \"input_gradient\" else 1), a",
        (f"4 {R}parallel/test_layers_linear.py",),
    ),
    Mutant(
        "layers: own rows alone have a part in the gradient of a bias", "pdgemm/parallel/layers/linear.py",
        "db += later.sum(axis=0)",
        "db += later[s.block(s.tokens, self._index)].sum(axis=0)",
        (f"4 {R}parallel/test_layers_linear.py",),
    ),
    Mutant(
        "layers: sums of rows have addends of the call before", "pdgemm/parallel/layers/linear.py",
        "        addends[own] = 0\n", "",
        (f"2 {R}parallel/test_layers_linear.py",),
    ),
    Mutant(
        "layers: rows that arrive later are not multiplied", "pdgemm/parallel/layers/linear.py",
        "        yield whole, slice(0, own.start)\n",
        "",
        (f"4 {R}parallel/test_layers_linear.py",),
    ),
    Mutant(
        "layers: sums of rows are those of another rank", "pdgemm/parallel/layers/line_collectives.py",
        "        first = sum(counts[: self.index])\n        return",
        "        first = sum(counts[: self.index - 1])\n        return",
        (f"4 {R}parallel/test_layers_linear.py",),
    ),
    Mutant(
        "layers: a rank knows its X of the forward pass", "pdgemm/schedules/training/linear_schedule.py",
        "(\"columns\", \"weight_gradient\"): (\"all_gather\", \"\"),",
        "(\"columns\", \"weight_gradient\"): (\"\", \"\"),",
        (f"4 {R}parallel/test_layers_linear.py",),
    ),
    Mutant(
        "layers: rows without a word are not set to 0", "pdgemm/parallel/layers/vocabulary.py",
        "        rows[~here] = 0\n",
        "",
        (f"4 {R}parallel/test_layers_vocabulary.py",),
    ),
    Mutant(
        "layers: a softmax has the largest logit of its rank", "pdgemm/parallel/layers/vocabulary.py",
        "            largest = self._line.largest(largest, counts)\n",
        "            pass\n",
        (f"4 {R}parallel/test_layers_vocabulary.py",),
    ),
    Mutant(
        "layers: labels are those of equal parts of the vocabulary", "pdgemm/parallel/layers/vocabulary.py",
        "columns = labels[here] - self.own.start",
        "columns = labels[here] - self._line.index * (self.vocabulary // self._line.size)",
        (f"4 {R}parallel/test_layers_vocabulary.py",),
    ),
    Mutant(
        "layers: a token without weight has a gradient", "pdgemm/parallel/layers/vocabulary.py",
        "            scale *= kept.weights\n",
        "            pass\n",
        (f"4 {R}parallel/test_layers_vocabulary.py",),
    ),
    Mutant(
        "layers: a query sees keys by their place on its rank", "pdgemm/parallel/layers/attention.py",
        "np.asarray(q_positions)[:, None] < np.asarray(k_positions)",
        "np.arange(sq)[:, None] < np.arange(sk)",
        (f"4 {R}parallel/test_layers_attention.py",),
    ),
    Mutant(
        "layers: keys are taken to be in the order of positions", "pdgemm/parallel/layers/context.py",
        "self.all_positions = np.concatenate([self.schedule.positions(rank) for rank in ranks])",
        "self.all_positions = np.arange(self.sequence)",
        (f"4 {R}parallel/test_layers_attention.py",),
    ),
    Mutant(
        "layers: gradients of keys are those of a rank's queries", "pdgemm/parallel/layers/context.py",
        "        return self._line.own_sums(addends, self.schedule.counts).transpose(1, 2, 0, 3)",
        "        return dk[:, :, : len(self.positions)]",
        (f"4 {R}parallel/test_layers_attention.py",),
    ),
    Mutant(
        "layers: heads of one group are those of another", "pdgemm/parallel/layers/heads.py",
        "x = x.transpose(0, 2, 3, 1, 4)\n        q =",
        "x = x[:, :, ::-1].transpose(0, 2, 3, 1, 4)\n        q =",
        (f"4 {R}parallel/test_layers_attention.py",),
    ),
    Mutant(
        "layers: dropout depends on the rank of a row", "pdgemm/parallel/layers/dropout.py",
        "np.asarray(rows)[slab, None]",
        "np.arange(len(x))[slab, None]",
        (f"4 {R}parallel/test_layers_rows.py",),
    ),
    Mutant(
        "layers: the variance of a row is constant", "pdgemm/parallel/layers/normalization.py",
        "    dx -= rows * means[1]\n",
        "",
        (f"4 {R}parallel/test_layers_rows.py",),
    ),
    Mutant(
        "collectives: sums in place are in the order of the ranks", "pdgemm/transport/collectives.py",
        "sums = added + sums[len(added) * 2 :]", "sums = [added[0], *sums[2:]]",
        (f"4 {R}transport/test_collectives.py",),
    ),
    Mutant(
        "training: ranks with another rate are not noticed", "pdgemm/parallel/buckets.py",
        "failures >= _FAILED or others or", "failures >= _FAILED or",
        (f"4 {R}parallel/test_training_errors.py",),
    ),
    Mutant(
        "training: copies along tp drift apart", "pdgemm/parallel/buckets.py",
        "or others or (apart and not failures):", "or others:",
        (f"2 {R}parallel/test_mistakes_on_one_rank.py",),
    ),
    Mutant(
        "training: gradients of a pass that has failed are those of the next step", "pdgemm/parallel/buckets.py",
        "                line.interrupt()", "                pass",
        (f"2 {R}parallel/test_mistakes_on_one_rank.py",),
    ),
    Mutant(
        "training: rules that say nothing of themselves are equal", "pdgemm/parallel/updates/update_rules.py",
        "if type(rule).__repr__ is object.__repr__:", "if False:",
        (f"2 {R}parallel/test_mistakes_on_one_rank.py",),
    ),
    Mutant(
        "layers: arguments that are known are not compared", "pdgemm/parallel/line_checks.py",
        "if known and not (self._compare and", "if known and not (False and",
        (f"2 {R}parallel/test_mistakes_on_one_rank.py",),
    ),
    Mutant(
        "training: after an error gradients stay ready", "pdgemm/parallel/buckets.py",
        "            self.clear()\n            agree(", "            agree(",
        (f"1 {R}parallel/test_training_errors.py",),
    ),
    Mutant(
        "training: an exception on one rank leaves others waiting for parameters",
        "pdgemm/parallel/divided_parameters.py",
        "            self._complete()  # other ranks gather on", "            pass  # other ranks gather on",
        (f"4 {R}parallel/test_training_errors.py",),
    ),
    Mutant(
        "training: master weights begin with rounded ones", "pdgemm/parallel/flat_storage.py",
        "self.own_masters(bucket)[place] = value[elements]",
        "self.own_masters(bucket)[place] = value[elements].astype(self.layout.dtype)",
        (f"1 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "training: a rank without further steps is not missed", "pdgemm/parallel/data/prefetch.py",
        "if failures == _ENDED * self._mesh.shape.dp:", "if ended:",
        (f"4 {R}parallel/test_training_errors.py",),
    ),
    Mutant(
        "training: a step without samples divides by 0", "pdgemm/parallel/data/prefetch.py",
        "if not 0 < divisor < inf:", "if not 0 <= divisor < inf:",
        (f"1 {R}parallel/test_training_errors.py",),
    ),
    Mutant(
        "training: a run that goes on begins with its first samples", "pdgemm/parallel/states/training_state.py",
        "self.step, optimizer.updates = numbers[_STEP], numbers[_UPDATES]",
        "self.step, optimizer.updates = 0, numbers[_UPDATES]",
        (f"1 {R}parallel/test_training_state.py",),
    ),
    Mutant(
        "training: who waits in its passes is slow, too", "pdgemm/tools/profiling/profile.py",
        ' - of("waits", 0.0)', "",
        (f"4 {R}parallel/test_training_state.py",),
    ),
    Mutant(
        "calibrate: an impossible link is not measured again", "pdgemm/tools/calibrate/links.py",
        "_TRIES = 3", "_TRIES = 1",
        (f"1 {R}planning/test_calibrate.py",),
    ),
    Mutant(
        "calibrate: a file of impossible figures is written", "pdgemm/tools/cli/plan_commands.py",
        "if wrong:", "if not wrong:",
        (f"1 {R}planning/test_calibrate.py",),
    ),
    Mutant(
        "report: the title calls the transpose of A by the name of A", "pdgemm/algorithms/product_report.py",
        "operands=names,", 'operands=("A", names[1]),',
        (f"1 {R}planning/test_reports.py",),
    ),
    Mutant(
        "training: the norm counts parameters on each rank along tp", "pdgemm/parallel/buckets.py",
        " / copies for copies", " for copies",
        (f"2 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: the gradient of a tied parameter is that of one stage",
        "pdgemm/schedules/training/parameter_division.py",
        "(ENDS, self.tied and (apart or mesh.pp > 1))", "(ENDS, False)",
        (f"2 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: the norm has half of a tied parameter", "pdgemm/schedules/training/parameter_division.py",
        "and not added else 1\n", "and not added else 1 + self.tied\n",
        (f"2 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: addends of the gradients of norms are not added along tp",
        "pdgemm/schedules/training/parameter_division.py",
        '("tp", added and mesh.tp > 1)', '("tp", self.ep is not None and mesh.tp > 1)',
        (f"2 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: gradients of different experts are added", "pdgemm/schedules/training/parameter_division.py",
        'last = COPIES if self.ep is not None and mesh.ep > 1 else "dp"', 'last = "dp"',
        (f"2 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: a state has the windows of other ranks along tp", "pdgemm/parallel/states/training_state.py",
        "for rank, window in owners.items():", "for rank, window in zip(owners, [*owners.values()][::-1]):",
        (f"2 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: a rank goes on with the window of another rank", "pdgemm/parallel/states/training_state.py",
        "division.window(mesh.shape, mesh.rank)\n", "division.window(mesh.shape, mesh.rank ^ 1)\n",
        (f"2 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: a microbatch has other samples on other numbers of ranks", "pdgemm/parallel/data/sampler.py",
        "_part(rows, ranks * microbatches, at * ranks + index)",
        "_part(rows, ranks * microbatches, index * microbatches + at)",
        (f"0 {U}schedules/test_training_values.py",),
    ),
    Mutant(
        "training: lines along joined axes number their ranks twice", "pdgemm/schedules/training/mesh_shape.py",
        "at = at * len(along) + along.index(rank)", "at += along.index(rank)",
        (f"0 {U}schedules/test_training_values.py",),
    ),
    Mutant(
        "training: a tree begins along tp", "pdgemm/schedules/training/parameter_division.py",
        "[*(name for name, divides in names if divides), last]",
        "[last, *(name for name, divides in names if divides)]",
        (f"4 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: a tree adds gradients of two microbatches as those of one", "pdgemm/parallel/line_buckets.py",
        "        elif self.layout.tree:", "        elif False:",
        (f"1 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: of two uses of a parameter the second is lost", "pdgemm/parallel/buckets.py",
        "                line.storage.add_uses()\n", "                pass\n",
        (f"2 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: partial sums of one use take in the other", "pdgemm/parallel/line_buckets.py",
        "[first : first + layout.levels, bucket", "[: layout.levels, bucket",
        (f"2 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: one stage adds the uses of a tied parameter in each microbatch",
        "docs/examples/gpt/train.py", "apart=options.same_bits", "apart=False",
        ("2 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "training: digits of squares are added with rounding", "pdgemm/parallel/exact_squares.py",
        "= 1 << 13, 39", "= 1 << 13, 42",
        (f"0 {U}schedules/test_training_values.py",),
    ),
    Mutant(
        "training: pipeline stages send tied gradients with other tags", "pdgemm/parallel/layout_choice.py",
        "number = 2 * agreed.flag", "number = 2 * max((len(x.layout.buckets) for x in layouts.lines), default=0)",
        (f"2 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: MFU counts what is computed again", "pdgemm/parallel/step_report.py",
        "return self._share(self.model_flops)", "return self._share(self.hardware_flops)",
        (f"1 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "training: a bucket has parameters of two chunks", "pdgemm/schedules/training/flat_layout.py",
        "if names and (x.chunk != chunk or place.stop - start > self.bucket_words):",
        "if names and place.stop - start > self.bucket_words:",
        (f"0 {U}schedules/test_training_values.py",),
    ),
    Mutant(
        "training: a pass of a chunk gathers all parameters", "pdgemm/parallel/line_buckets.py",
        "if chunk in (None, x.chunk)]", "if True]",
        (f"4 {R}parallel/test_passes_of_chunks.py",),
    ),
    Mutant(
        "training: a parameter of another chunk is that of a slot", "pdgemm/parallel/divided_parameters.py",
        "if turn < max(0, self._at):", "if turn < self._at:",
        (f"4 {R}parallel/test_passes_of_chunks.py",),
    ),
    Mutant(
        "training: the ends have a tied parameter in chunks of their own", "pdgemm/parallel/layout_choice.py",
        "chunk = 0 if ENDS in line.axis else x.chunk", "chunk = x.chunk",
        (f"2 {R}parallel/test_divided_parameters.py",),
    ),
    Mutant(
        "collectives: ranks beyond a power of two take no part", "pdgemm/schedules/collectives/collective_steps.py",
        "self.extra = len(members) - self.size", "self.extra = 0",
        (f"0 {U}schedules/test_collective_schedules.py",),
    ),
    Mutant(
        "collectives: sums on two levels leave the last node out", "pdgemm/schedules/collectives/collective.py",
        "for group in groups))\n    across = [", "for group in groups[:-1]))\n    across = [",
        (f"0 {U}schedules/test_collective_schedules.py",),
    ),
    Mutant(
        "examples: means of a batch are those of a rank's own samples", "docs/examples/digits_conv.py",
        "count, mean = self.total(", "count, mean = (",
        ("4 tests/examples/test_training_examples.py",),
    ),
    Mutant(
        "examples: variances of a batch are made of a rank's own samples", "docs/examples/digits_conv.py",
        "(squares,) = self.total(", "squares = (",
        ("4 tests/examples/test_training_examples.py",),
    ),
    Mutant(
        "examples: a rank's samples move the statistics of its own alone", "docs/examples/digits_conv.py",
        "shift, scale = self.total(shift, scale)", "shift, scale = shift, scale",
        ("4 tests/examples/test_training_examples.py",),
    ),
    Mutant(
        "training: arrays that are added up exchange their places", "pdgemm/parallel/mesh.py",
        "x[end - value.size : end]", "x[: value.size]",
        ("1 tests/examples/test_training_examples.py",),
    ),
    Mutant(
        "examples: a rank splits its trees by its own rows", "docs/examples/boosted_trees.py",
        'return mesh.all_reduce(own, kind="histograms")', "return own",
        ("3 tests/examples/test_boosted_trees.py",),
    ),
    Mutant(
        "examples: gradients are rounded to whole numbers", "docs/examples/boosted_trees.py",
        "np.rint(np.ldexp(gradients, -exponents[:, None]))", "np.rint(gradients)",
        ("3 tests/examples/test_boosted_trees.py",),
    ),
    Mutant(
        "examples: the bound of a sum of integers leaves the rows out", "docs/examples/boosted_trees.py",
        "if rows << bits > LARGEST:", "if 1 << bits > LARGEST:",
        ("1 tests/examples/test_boosted_trees.py",),
    ),
    Mutant(
        "examples: rows without a value go to the left when a split is chosen", "docs/examples/boosted_trees.py",
        "np.stack([left + missing, left], axis=-1)", "np.stack([left + missing, left + missing], axis=-1)",
        ("1 tests/examples/test_boosted_trees.py",),
    ),
    Mutant(
        "examples: rows without a value go to the left when they descend", "docs/examples/boosted_trees.py",
        'np.where(np.isnan(x), here["missing"], x > here["edge"])', 'np.where(np.isnan(x), 0, x > here["edge"])',
        ("1 tests/examples/test_boosted_trees.py",),
    ),
    Mutant(
        "examples: a node has the histogram of its sibling", "docs/examples/boosted_trees.py",
        "own, both - own", "own, own",
        ("1 tests/examples/test_boosted_trees.py",),
    ),
    Mutant(
        "examples: units of gradients are those of a rank's own rows", "docs/examples/boosted_trees.py",
        "bounds = mesh.sum(own)[0].max(axis=0)", "bounds = own.max(axis=0)",
        ("3 tests/examples/test_boosted_trees.py",),
    ),
    Mutant(
        "examples: the ends of bins are those of a rank's own rows", "docs/examples/boosted_trees.py",
        'enough = mesh.all_reduce(counts, kind="edges") >= wanted', "enough = counts >= wanted",
        ("3 tests/examples/test_boosted_trees.py",),
    ),
    Mutant(
        "training: ranks sum arrays of different types", "pdgemm/parallel/mesh.py",
        "kind, x.shape, x.dtype]", "kind, x.shape]",
        ("2 tests/ranks/parallel/test_mesh_sums.py",),
    ),
    Mutant(
        "training: integers are summed as float64", "pdgemm/parallel/mesh.py",
        'total = x.copy(order="C")\n', "total = x.astype(float)\n",
        ("2 tests/ranks/parallel/test_mesh_sums.py",),
    ),
    Mutant(
        "experts: tokens return in the order in which they arrive", "pdgemm/parallel/layers/experts.py",
        "np.concatenate(self._exchanged(parts, exchange, back=True))",
        "np.concatenate(self._exchanged(parts, exchange, back=True)[::-1])",
        (f"4 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: the capacity is one of each run of tokens", "pdgemm/schedules/training/token_exchange.py",
        "np.clip(self.capacity - before,", "np.clip(self.capacity - 0 * before,",
        (f"0 {U}schedules/test_token_exchange.py",),
    ),
    Mutant(
        "experts: tokens are dropped in the order of ranks", "pdgemm/schedules/training/token_exchange.py",
        'return np.argsort(self.first, kind="stable")', "return np.argsort(self.owner, kind='stable')",
        (f"4 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: a factor of the capacity is rounded to binary digits", "pdgemm/schedules/training/token_exchange.py",
        "Fraction(repr(float(factor)))", "Fraction(float(factor))",
        (f"0 {U}schedules/test_token_exchange.py",),
    ),
    Mutant(
        "experts: those of another rank along ep", "pdgemm/schedules/training/token_exchange.py",
        "self.shape.ep, index)", "self.shape.ep, self.shape.ep - 1 - index)",
        (f"4 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: they are balanced by the fractions of a rank's own tokens", "pdgemm/parallel/layers/experts.py",
        "exchange.loads / max(1, exchange.tokens * self.topk)", "own.counts.sum(axis=0) / max(1, len(x) * self.topk)",
        (f"4 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: the loss that balances them is not scaled", "pdgemm/parallel/layers/experts.py",
        "dgates, scale * kept.slope)", "dgates, kept.slope)",
        (f"1 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: a choice that is dropped adds a result of another token", "pdgemm/parallel/layers/experts.py",
        "tokens = np.flatnonzero(choice >= 0)", "tokens = np.arange(n)",
        (f"1 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: a rank alone raises what is wrong with its tokens", "pdgemm/parallel/layers/experts.py",
        "        if failures or (checksums",
        "        if error:\n            raise error\n        if failures or (checksums",
        (f"4 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: who waits for tokens keeps reductions waiting", "pdgemm/parallel/layers/experts.py",
        "lambda group: mesh.wait(group, line),", "None,",
        (f"4 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: the gate of one expert a token is a quotient of 1", "pdgemm/parallel/layers/router.py",
        "if topk > 1:", "if topk:",
        (f"1 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: the router learns nothing of the experts that are chosen", "pdgemm/parallel/layers/router.py",
        "np.take_along_axis(dp, chosen, axis=1) + dgates", "np.take_along_axis(dp, chosen, axis=1)",
        (f"1 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: gradients by gates as if they had no common sum", "pdgemm/parallel/layers/router.py",
        "(dgates - (dgates * gates).sum(axis=1, keepdims=True)) / total", "dgates / total",
        (f"1 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: of equal scores the higher expert is chosen", "pdgemm/parallel/layers/router.py",
        'np.argsort(-scores, axis=1, kind="stable")[:, :topk]',
        'np.argsort(scores, axis=1, kind="stable")[:, : -topk - 1 : -1]',
        (f"1 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "training: parts of microbatches begin elsewhere than those of batches", "pdgemm/parallel/data/sampler.py",
        "_part(rows, ranks * microbatches, at * ranks + index)", "_part(_part(rows, microbatches, at), ranks, index)",
        (f"0 {U}schedules/test_training_values.py", "2 tests/examples/test_gpt.py"),
    ),
    Mutant(
        "layers: rows that no rank has are looked for in a buffer", "pdgemm/parallel/layers/line_collectives.py",
        "if not x.size:", "if False:",
        ("4 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "layers: no gradient has a size where no rank has a row", "pdgemm/parallel/layers/heads.py",
        "dq.reshape(b, self.kv_heads, served, positions, d)", "dq.reshape(b, self.kv_heads, -1, positions, d)",
        ("2 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "errors: a rank that waits joins no agreement to which it is called", "pdgemm/parallel/line_checks.py",
        "if not any(x[:2] == at and x[2] <= self.passed() for x in self._calls):", "if True:",
        (f"4 {R}parallel/test_bad_input.py",),
    ),
    Mutant(
        "errors: a call from before an exception of the whole mesh still counts", "pdgemm/parallel/line_checks.py",
        "if x[0] >= at[0] and x[1] >= at[1]]", "if x[0] >= at[0]]",
        (f"6 {R}parallel/test_bad_input.py",),
    ),
    Mutant(
        "errors: message tags after a failure are those before it", "pdgemm/parallel/line_checks.py",
        "- tag if failures else tag", "- tag if failures < 0 else tag",
        (f"4 {R}parallel/test_bad_input.py",),
    ),
    Mutant(
        "errors: ranks have different seeds of a dropout", "pdgemm/parallel/layers/dropout.py",
        'arguments += ["Dropout", f"rate {self.rate}", f"seed {self.seed}"]',
        'arguments += ["Dropout", f"rate {self.rate}"]',
        (f"4 {R}parallel/test_bad_input.py",),
    ),
    Mutant(
        "errors: a product begins before all ranks of its line have come", "pdgemm/parallel/layers/line_products.py",
        'self._checks.meet(self._mesh.traffic["decisions"])', "pass",
        (f"4 {R}parallel/test_bad_input.py",),
    ),
    Mutant(
        "errors: a rank leaves the others at the start of a product", "pdgemm/parallel/line_checks.py",
        "if any(x[0] == at and x[1 + self._agreeing] == before for x in self._left):", "if True:",
        (f"6 {R}parallel/test_bad_input.py",),
    ),
    Mutant(
        "errors: a rank that leaves a line names the product before", "pdgemm/parallel/line_checks.py",
        "self._agreements, line._met + 1,", "self._agreements, line._met,",
        (f"6 {R}parallel/test_bad_input.py",),
    ),
    Mutant(
        "errors: a rank that leaves a line names the agreement after", "pdgemm/parallel/line_checks.py",
        "line._agreements + line._agreeing)", "line._agreements + 1)",
        (f"6 {R}parallel/test_bad_input.py",),
    ),
    Mutant(
        "errors: ranks agree on what is new before all of them have come", "pdgemm/parallel/line_checks.py",
        "            self._checks.assemble()\n", "",
        (f"6 {R}parallel/test_bad_input.py",),
    ),
    Mutant(
        "errors: messages of steps travel with those of products", "pdgemm/parallel/mesh.py",
        "failures.tracked(MPI.Intracomm(self.grid.comm.Dup()))", "self.grid.comm",
        (f"2 {R}parallel/test_dropped_messages.py",),
    ),
    Mutant(
        "training: sums of two levels know no nodes", "pdgemm/schedules/training/flat_layout.py",
        "counts, dtype, self.node, mover=self.mover)", "counts, dtype, mover=self.mover)",
        (f"6 {R}parallel/test_buckets.py",),
    ),
    Mutant(
        "errors: a request that a pipeline left is dropped twice", "pdgemm/transport/movers/arrivals.py",
        "[*{id(arrival): arrival for group in groups for arrival in group}.values()]",
        "[arrival for group in groups for arrival in group]",
        (f"2 {R}parallel/test_dropped_messages.py",),
    ),
    Mutant(
        "errors: a mesh is freed before transfers of its last step are complete", "pdgemm/parallel/mesh.py",
        "if not self._fails():", "if self._fails() is None:",
        (f"2 {R}parallel/test_dropped_messages.py",),
    ),
    Mutant(
        "errors: a mesh that is freed waits for transfers that not all ranks have begun", "pdgemm/parallel/mesh.py",
        "flag=uneven", "flag=uneven and False",
        (f"2 {R}parallel/test_dropped_messages.py",),
    ),
    Mutant(
        "errors: a step after an interrupt takes the messages of the one before", "pdgemm/parallel/mesh.py",
        "self.transfers.interrupted = True", "pass",
        (f"2 {R}parallel/test_dropped_messages.py",),
    ),
    Mutant(
        "errors: arrays of a wait that is interrupted are freed under MPI", "pdgemm/transport/movers/arrivals.py",
        "except BaseException as error:", "except Exception as error:",
        (f"2 {R}parallel/test_dropped_messages.py",),
    ),
    Mutant(
        "errors: a collective that was given up counts as complete", "pdgemm/transport/collectives.py",
        "self._stages = _no_more(self._stages)", "self._stages = iter(())",
        (f"2 {R}parallel/test_dropped_messages.py",),
    ),
    Mutant(
        "errors: an interrupt of a callback leaves the messages of a product", "pdgemm/support/agreement.py",
        "except BaseException as bad:", "except Exception as bad:",
        (f"4 {R}algorithms/test_summa.py",),
    ),
    Mutant(
        "errors: signals of a collective that was given up stay in progress", "pdgemm/transport/collectives.py",
        "self._posted or self._requests or ()", "self._requests or ()",
        (f"4 {R}parallel/test_dropped_messages.py",),
    ),
    Mutant(
        "errors: receives are left in progress when messages are dropped", "pdgemm/transport/dropped_messages.py",
        "request.Cancel()", "request.Test()",
        (f"2 {R}parallel/test_dropped_messages.py",),
    ),
    Mutant(
        "errors: a step after a failure has the tags of the one before", "pdgemm/parallel/mesh.py",
        "AFTER_FAILURES - step * (failures + 1)", "AFTER_FAILURES - step",
        (f"4 {R}parallel/test_message_tags.py",),
    ),
    Mutant(
        "errors: tags of pipelines go down to those of buckets", "pdgemm/parallel/mesh.py",
        "(failures + 1)) < dealt:", "(failures + 1)) < CALL:",
        (f"1 {R}parallel/test_message_tags.py",),
    ),
    Mutant(
        "errors: each pipeline has tags of its own", "pdgemm/parallel/mesh.py",
        "step = max(self._step, number)", "step = self._step + number",
        (f"2 {R}parallel/test_message_tags.py",),
    ),
    Mutant(
        "errors: sums after a failure have tags of pipelines", "pdgemm/parallel/line_checks.py",
        "last_tag() - 1 - (CALL + 1)", "last_tag() - AFTER_FAILURES - (CALL + 1)",
        (f"2 {R}parallel/test_message_tags.py",),
    ),
    Mutant(
        "errors: an exception of a step is raised on its rank alone", "pdgemm/parallel/line_checks.py",
        "if raised_on(error) != self.comm.size:", "if raised_on(error):",
        (f"4 {R}parallel/test_pipelines.py",),
    ),
    Mutant(
        "experts: divisors of ranks are not compared", "pdgemm/parallel/layers/experts.py",
        "if failures or (checksums != checksums[0]).any():", "if failures:",
        (f"4 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "experts: gradients are divided by the ranks along dp", "pdgemm/parallel/layers/experts.py",
        "add_product(self.mesh, inputs[rows].T, outputs[rows], 1, gradient[at])",
        "add_product(self.mesh, inputs[rows].T, outputs[rows] / self.mesh.shape.dp, 1, gradient[at])",
        (f"4 {R}parallel/test_experts.py",),
    ),
    Mutant(
        "transformer: gradients of layer norms are those of a rank's own tokens", "docs/examples/gpt/sharding.py",
        'shared = "sum" if sequence else None', "shared = None",
        ("2 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "transformer: ranks along tp have other heads than their keys", "docs/examples/gpt/sharding.py",
        "(h, keys, columns)), tp=1)", "(h, columns, keys)), tp=1)",
        ("2 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "transformer: the loss is the mean of pipeline stages", "docs/examples/gpt/train.py",
        "loss / (samples.divisor * options.sequence)", "loss / (samples.divisor * options.sequence) / mesh.shape.pp",
        ("2 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "transformer: a backward pass has the tokens of the first microbatch", "docs/examples/gpt/model.py",
        "batch, split = self.batches[microbatch],", "batch, split = self.batches[0],",
        ("2 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "transformer: a table that is used twice has its second gradient again", "docs/examples/gpt/model.py",
        "        self.model.dtable[:] = 0\n", "",
        ("2 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "transformer: a layer that is computed again drops other features", "docs/examples/gpt/model.py",
        "* 3 + place\n", "* 3 + place + 7 * len(self.model.kept)\n",
        ("1 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "transformer: tokens of a rank have positions from 0", "docs/examples/gpt/train.py",
        "tokens[:, places + 1].ravel(), order % length, order,",
        "tokens[:, places + 1].ravel(), order % len(places), order,",
        ("2 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "transformer: experts of a layer that is computed again have their tokens still",
        "docs/examples/gpt/accounting.py",
        "forwards=forwards(model)", "forwards=1",
        ("4 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "transformer: the tokens of a rank are one run", "docs/examples/gpt/accounting.py",
        "np.count_nonzero(np.diff(order, prepend=-2) > 1)", "min(1, len(order))",
        ("2 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "experts: tokens are sent to them twice", "pdgemm/parallel/layers/experts.py",
        "        inputs = self._to_experts(x[taken // self.topk], exchange)\n",
        "        inputs = self._to_experts(x[taken // self.topk], exchange)\n" * 2,
        ("2 tests/examples/test_gpt.py",),
    ),
    Mutant(
        "reports: words of the last step are those of all steps", "pdgemm/parallel/step_report.py",
        "self._expected.update({", "self._expected = Counter({",
        (f"2 {R}parallel/test_divided_parameters.py", "2 tests/examples/test_gpt.py"),
    ),
    Mutant(
        "collectives: partners exchange the parts that they go on to sum themselves",
        "pdgemm/schedules/collectives/collective_steps.py",
        "owner = (partner % (2 * distance))[:, None]", "owner = (at % (2 * distance))[:, None]",
        (f"0 {U}schedules/test_collective_schedules.py",),
    ),
    Mutant(
        "programs: ranks compare addresses", "pdgemm/support/agreement.py",
        '    description = _ADDRESS.sub("", description)\n', "",
        (f"4 {R}linalg/test_linalg_plans.py",),
    ),
    Mutant(
        "low precision: a part of a matrix has the scales of its first blocks", "pdgemm/scaled/scaled_matrix.py",
        "of_scales.append(slice(first, last if stop > start else first))",
        "of_scales.append(slice(0, last - first if stop > start else 0))",
        (f"1 {R}scaled/test_scaled.py",),
    ),
    Mutant(
        "low precision: scales are not transposed with their values", "pdgemm/scaled/scaled_matrix.py",
        'turned = x if op_letter(trans, name) == "N" else x.T', "turned = x",
        (f"1 {R}scaled/test_scaled.py",),
    ),
    Mutant(
        "low precision: integers that are too large wrap", "pdgemm/scaled/quantization.py",
        "    if saturate:\n", '    if saturate and dtype.kind != "i":\n',
        (f"1 {R}scaled/test_quantize.py",),
    ),
    Mutant(
        "low precision: a panel has the scales of local inner indices", "pdgemm/schedules/products/summa_product.py",
        "inner.to_global(x.a.indices()[0], x.col)", "x.a.indices()[0]",
        (f"4 {R}scaled/test_scaled.py",),
    ),
    Mutant(
        "low precision: all layers have the scales of the first layer", "pdgemm/schedules/products/layered_product.py",
        "[self._inner.indices(x) for x in", "[self._inner.indices(0) for x in",
        (f"4 {R}scaled/test_scaled.py",),
    ),
    Mutant(
        "low precision: panels of columns have the scales of the first columns",
        "pdgemm/algorithms/products/stationary.py",
        "right and right.of(plan.columns(step))", "right",
        (f"4 {R}scaled/test_scaled.py",),
    ),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="does each bug apply?")
    parser.add_argument("--all", action="store_true", help="all combinations and examples, as scripts/test.sh --all")
    parser.add_argument("--tests", metavar="COMMIT", help="the tests of this commit")
    parser.add_argument("--only", default="", help="bugs whose names have one of these in them: watchdog,blas")
    asked = parser.parse_args()
    chosen = [x for x in MUTANTS if any(part in x.name for part in asked.only.split(","))]
    wrong = [f"{x.name}: {there} places in {x.file} have its text" for x in chosen if (there := places(x)) != 1]
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


def places(mutant: Mutant) -> int:
    """How often the text is there that the bug takes the place of."""
    return (ROOT / mutant.file).read_text().count(mutant.old)


def caught(mutant: Mutant, folder: Path, options: tuple[str, ...], commit: str | None) -> str:
    """Who catches a bug, in words."""
    copy_to(folder, commit)
    path = folder / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    for tests in mutant.tests:
        if not passes(tests, folder, options):
            return f"caught by {tests}" if sound(tests, options, commit) else f"MISSED: {tests} fails without it"
    return "MISSED"


@cache
def sound(tests: str, options: tuple[str, ...], commit: str | None) -> bool:
    """Do tests pass without a bug?"""
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
    """Does a run of these tests end well?  Paths that are not there (in another commit) are left out."""
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
        return run.wait(SECONDS) in (0, 5)  # 5: none of these tests belongs on so many ranks
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, 9)
        run.wait()
        return False


if __name__ == "__main__":
    sys.exit(main())
