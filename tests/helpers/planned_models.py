"""Models and machines for plans of training."""

from __future__ import annotations

from pdgemm.planning.machines.known_machines import accelerator
from pdgemm.planning.models.model_shape import PRESETS, ModelShape

A100, H100 = accelerator("a100-80"), accelerator("h100")
GPT3 = ModelShape(**PRESETS["gpt3-175b"])
SMALL = ModelShape(8, 64, 4, 256, 32)
