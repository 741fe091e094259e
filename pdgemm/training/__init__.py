"""Training of a torch module on a mesh of ranks: a table of placements says how its layers are divided."""

from pdgemm.training.distribute import distribute
from pdgemm.training.layers.experts import Experts, MixtureOfExperts
from pdgemm.training.layers.placements import Columns, Gathered, Positions, Replicated, Rows, Sequence, Vocabulary
from pdgemm.training.mesh import Mesh
from pdgemm.training.training_run import Run

__all__ = [
    "Columns", "Experts", "Gathered", "Mesh", "MixtureOfExperts", "Positions", "Replicated", "Rows", "Run", "Sequence",
    "Vocabulary", "distribute",
]  # fmt: skip
