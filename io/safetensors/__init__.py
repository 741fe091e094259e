"""Tensors by name in safetensors files, in which other libraries keep the parameters of models.

The header is read, and what was written is checked, by the safetensors library (`pip install 'pdgemm[safetensors]'`);
elements are read and written by all ranks in parallel.  Parameters of `pdgemm.parallel` go there by
`parallel.export_parameters`.
"""

from pdgemm.io.safetensors.matrices import load_all as load_all
from pdgemm.io.safetensors.matrices import save_all as save_all
