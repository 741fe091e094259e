"""Training of a torch module on a mesh of ranks: a table of placements says how its layers are divided."""

from pdgemm.parallel.mesh import Mesh
from pdgemm.training.distribute import distribute
from pdgemm.training.layers.experts import Experts, MixtureOfExperts
from pdgemm.training.layers.placements import Columns, Gathered, Positions, Replicated, Rows, Sequence, Vocabulary
from pdgemm.training.states.name_tables import Named
from pdgemm.training.training_run import Run
from pdgemm.training.updates import LossScale

__all__ = [
    "Columns", "Experts", "Gathered", "LossScale", "Mesh", "MixtureOfExperts", "Named", "Positions", "Replicated",
    "Rows", "Run", "Sequence", "Vocabulary", "distribute",
]  # fmt: skip
