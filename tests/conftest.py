"""The fixtures and the report of parallel runs come from mpi_report.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # whatever the import mode
pytest_plugins = ["mpi_report"]
