"""The Python array API standard, version 2025.12, on distributed arrays."""

from numpy import abs as abs
from numpy import add as add
from numpy import sum as sum

from pdgemm.array_api.array import Array as Array
from pdgemm.array_api.creation import asarray as asarray

__array_api_version__ = "2025.12"
