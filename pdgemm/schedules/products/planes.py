"""Finite planes: sets of points, the lines, such that each pair of points is on exactly one line.

A projective plane of order q has q^2 + q + 1 points and as many lines of q + 1 points.  Without one line and its points
it is an affine plane: q^2 points, and q^2 + q lines of q points.  Both exist where q is the power of a prime.  The
triangle (q = 1) and the point (q = 0) are projective planes, too.

J. Singer, A theorem in finite projective geometry and some applications to number theory, Trans. AMS 43, 1938.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import isqrt
from typing import NamedTuple


class Plane(NamedTuple):
    """A finite plane.   order : q.   affine : the plane is affine, not projective."""

    order: int
    affine: bool = False

    @property
    def points(self) -> int:
        return self.order**2 if self.affine else self.order**2 + self.order + 1

    @property
    def lines(self) -> int:
        return self.order**2 + self.order + (not self.affine)

    @property
    def share(self) -> float:
        """The fraction of all points that are on a line."""
        return (self.order + (not self.affine)) / self.points

    @classmethod
    def largest(cls, lines: int) -> Plane:
        """Return the plane with the most lines, at most `lines`, whose lines have the smallest share of all points."""
        orders = (q for q in range(isqrt(lines), -1, -1) if q < 2 or prime_root(q)[0])
        planes = (plane for q in orders for plane in (cls(q), cls(q, affine=q > 1)))
        return next(plane for plane in planes if plane.lines <= lines)


@lru_cache(maxsize=64)
def point_names(plane: Plane) -> dict[int, int]:
    """Return the number in a plane of each of its points, by the number in the projective plane of the same order.

    Each of these points is on the line of its number in the projective plane.
    """
    number = plane.order**2 + plane.order + 1
    absent = {(x - 1) % number for x in difference_set(plane.order)} if plane.affine else ()  # the last line
    return {x: name for name, x in enumerate(x for x in range(number) if x not in absent)}


@lru_cache(maxsize=64)
def lines_of(plane: Plane) -> tuple[tuple[int, ...], ...]:
    """Return the points of each line, ascending.  Line x of a projective plane contains point x."""
    names, number = point_names(plane), plane.order**2 + plane.order + 1
    on_lines = (sorted((first + x) % number for x in difference_set(plane.order)) for first in range(plane.lines))
    return tuple(tuple(names[x] for x in line if x in names) for line in on_lines)


def prime_root(q: int) -> tuple[int, int]:
    """Return (p, e), where q = p^e > 1 and p is prime; (0, 0) if q is not the power of a prime."""
    p = next((x for x in range(2, isqrt(q) + 1) if q % x == 0), q)
    e = next(e for e in range(1, q + 1) if p**e >= q)
    return (p, e) if p**e == q else (0, 0)


@lru_cache(maxsize=64)
def difference_set(q: int) -> tuple[int, ...]:
    """Return q + 1 numbers, 0 among them, whose differences modulo N = q^2 + q + 1 are 1, ..., N - 1, each once.

    A recurrence s(i + d) = sum_j c_j s(i + j) of d = 3 e terms modulo p gives traces s(i) of the powers x^i in the
    field of p^d elements, if its polynomial is primitive.  The result has those i for which x^i is in a plane over the
    field of q = p^e elements: s(i + j N) = 0 for all j < e.  Polynomials are tried until the differences are right.
    """
    number = q * q + q + 1
    if q < 2:
        return tuple(range(q + 1))
    p, e = prime_root(q)
    for coefficients in product(range(p), repeat=3 * e):
        terms = [(j, c) for j, c in enumerate(reversed(coefficients)) if c]
        s = [0] * (3 * e - 1) + [1]
        for i in range(e * number - 3 * e):
            s.append(sum(c * s[i + j] for j, c in terms) % p)
        zeros = [i for i in range(number) if not any(s[i::number][:e])]
        if len(zeros) == q + 1 and len({(x - y) % number for x in zeros for y in zeros}) == number:
            return tuple(sorted((x - zeros[0]) % number for x in zeros))
    raise AssertionError(f"a plane of order {q} exists")
