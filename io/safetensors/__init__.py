"""Tensors by name in safetensors files, in which other libraries keep the parameters of models.

The safetensors library (`pip install 'pdgemm[safetensors]'`) reads the header and checks files that were written; all
ranks read and write elements in parallel.
"""

from pdgemm.io.safetensors.matrices import load_all as load_all, save_all as save_all
