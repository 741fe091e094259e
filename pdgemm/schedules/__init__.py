"""The algorithms as values: the steps, traffic and buffers of C := alpha A B + beta C on layouts that fit.

All figures are computed for any rank without communication; for rank None they are the maximum over all ranks.
"""

from pdgemm.schedules.cannon_product import Cannon
from pdgemm.schedules.layered_product import Inner, Layered
from pdgemm.schedules.node_relay import NodeLine
from pdgemm.schedules.product import Product
from pdgemm.schedules.stationary_product import Stationary
from pdgemm.schedules.summa_product import Summa

__all__ = ["Cannon", "Inner", "Layered", "NodeLine", "Product", "Stationary", "Summa"]
