"""Layers of models on a mesh, forward and backward: arrays of each rank, and what moves between ranks.

Layers hold no parameters: a forward function takes them, and a backward function adds to their gradients.
"""

from pdgemm.parallel.layers.attention import attention as attention
from pdgemm.parallel.layers.attention import attention_backward as attention_backward
from pdgemm.parallel.layers.context import ContextSplit as ContextSplit
from pdgemm.parallel.layers.dropout import Dropout as Dropout
from pdgemm.parallel.layers.dropout import dropout as dropout
from pdgemm.parallel.layers.experts import Experts as Experts
from pdgemm.parallel.layers.experts import ExpertStatistics as ExpertStatistics
from pdgemm.parallel.layers.heads import HeadSplit as HeadSplit
from pdgemm.parallel.layers.linear import Linear as Linear
from pdgemm.parallel.layers.normalization import layernorm as layernorm
from pdgemm.parallel.layers.normalization import layernorm_backward as layernorm_backward
from pdgemm.parallel.layers.vocabulary import CrossEntropy as CrossEntropy
from pdgemm.parallel.layers.vocabulary import Embedding as Embedding
from pdgemm.parallel.layers.vocabulary import add_table_rows as add_table_rows
from pdgemm.parallel.layers.vocabulary import table_rows as table_rows
