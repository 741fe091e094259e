"""The algorithms as values: the steps, traffic and buffers of C := alpha A B + beta C on layouts that fit.

Figures are for any rank, without communication; for rank None they are the most that any rank needs.
"""

from pdgemm.products.cannon import Cannon
from pdgemm.products.layered import Inner, Layered
from pdgemm.products.line import Line
from pdgemm.products.product import Product
from pdgemm.products.stationary import Stationary
from pdgemm.products.summa import Summa

__all__ = ["Cannon", "Inner", "Layered", "Line", "Product", "Stationary", "Summa"]
