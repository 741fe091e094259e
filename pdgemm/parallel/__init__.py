"""A mesh of ranks and the samples of each rank, without torch; `pdgemm.training` trains modules of torch on a mesh."""

from pdgemm.parallel.mesh import Line as Line, Mesh as Mesh
from pdgemm.parallel.sampler import Sampler as Sampler
from pdgemm.schedules.training.mesh_shape import MeshShape as MeshShape
from pdgemm.schedules.training.pipeline_schedule import PipelineSchedule as PipelineSchedule
from pdgemm.schedules.training.pipeline_timeline import Timeline as Timeline
