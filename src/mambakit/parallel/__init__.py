"""Ranks: everything that knows that a run may be more than one process."""

from .mesh import Mesh
from .places import Sliced
from .ranks import Ranks, parallelize
from .slices import sharing_problems
from .world import DecidedElsewhere, World

__all__ = ["DecidedElsewhere", "Mesh", "Ranks", "Sliced", "World", "parallelize", "sharing_problems"]
