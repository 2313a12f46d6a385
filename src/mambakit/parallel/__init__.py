"""Ranks: everything that knows that a run may be more than one process."""

from .mesh import Mesh
from .places import Sliced
from .ranks import Ranks, parallelize
from .slices import sharing_problems
from .world import DecidedElsewhere, World, code_digest

__all__ = ["DecidedElsewhere", "Mesh", "Ranks", "Sliced", "World", "code_digest", "parallelize", "sharing_problems"]
