"""Training on several ranks, where every layout gives the numbers of one process, and what moves equals its formula.

Layers and their gradients are the caller's: arrays of NumPy, or of any library that shares memory with NumPy.  The
package keeps parameters, gradients and the optimizer's state in flat storage, divides them among ranks, and moves them.
"""

from pdgemm.parallel.buckets import Buckets as Buckets
from pdgemm.parallel.data.prefetch import Prefetch as Prefetch
from pdgemm.parallel.data.sampler import Sampler as Sampler
from pdgemm.parallel.mesh import Mesh as Mesh
from pdgemm.parallel.parts import Initial as Initial
from pdgemm.parallel.parts import Part as Part
from pdgemm.parallel.pipeline_stages import Pipeline as Pipeline
from pdgemm.parallel.pipeline_stages import Stage as Stage
from pdgemm.parallel.states.training_state import TrainingState as TrainingState
from pdgemm.parallel.states.whole_parameters import Unmatched as Unmatched
from pdgemm.parallel.states.whole_parameters import export_parameters as export_parameters
from pdgemm.parallel.states.whole_parameters import import_parameters as import_parameters
from pdgemm.parallel.step_report import StepReport as StepReport
from pdgemm.parallel.step_report import StepTimes as StepTimes
from pdgemm.parallel.updates.loss_scale import LossScale as LossScale
from pdgemm.parallel.updates.muon import Muon as Muon
from pdgemm.parallel.updates.rates import linear_scaling as linear_scaling
from pdgemm.parallel.updates.rates import warmup_cosine as warmup_cosine
from pdgemm.parallel.updates.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from pdgemm.parallel.updates.update_rules import SGD as SGD
from pdgemm.parallel.updates.update_rules import AdamW as AdamW
from pdgemm.schedules.training.flat_layout import FlatLayout as FlatLayout
from pdgemm.schedules.training.mesh_shape import MeshShape as MeshShape
from pdgemm.schedules.training.mesh_shape import block_of as block_of
from pdgemm.schedules.training.pipeline_orders import Action as Action
from pdgemm.schedules.training.pipeline_schedule import PipelineSchedule as PipelineSchedule
from pdgemm.schedules.training.pipeline_schedule import layers_of as layers_of
from pdgemm.schedules.training.pipeline_timeline import Timeline as Timeline
