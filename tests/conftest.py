"""The fixtures and the report of parallel runs come from mpi_report.py."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path[:0] = [str(path) for path in Path(__file__).parent.iterdir() if path.is_dir()]  # whatever the import mode
pytest_plugins = ["mpi_report"]
# no test asserts how fast it is; hypothesis would, and which rank it stops would be by chance
settings.register_profile("pdgemm", deadline=None)
settings.load_profile("pdgemm")
