"""The schedules of C := alpha A B + beta C, on layouts that fit each other."""

from pdgemm.schedules.products.cannon_product import Cannon
from pdgemm.schedules.products.layered_product import Inner, Layered
from pdgemm.schedules.products.product import Product
from pdgemm.schedules.products.stationary_product import Stationary
from pdgemm.schedules.products.summa_product import Summa

__all__ = ["Cannon", "Inner", "Layered", "Product", "Stationary", "Summa"]
