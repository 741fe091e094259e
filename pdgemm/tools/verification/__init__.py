"""Comparison of training programs with one process of plain torch, for `pdgemm verify-training`.  Loads no MPI."""

from pdgemm.tools.verification.training_record import record as record
