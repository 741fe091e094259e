"""The algorithms as values: the steps, traffic and buffers of C := alpha A B + beta C on layouts that fit.

Figures are for any rank, without communication; for rank None they are the most that any rank needs.
"""

from pdgemm.schedules.cannon_product import Cannon
from pdgemm.schedules.layered_product import Inner, Layered
from pdgemm.schedules.node_relay import Line
from pdgemm.schedules.product import Product
from pdgemm.schedules.stationary_product import Stationary
from pdgemm.schedules.summa_product import Summa

__all__ = ["Cannon", "Inner", "Layered", "Line", "Product", "Stationary", "Summa"]
