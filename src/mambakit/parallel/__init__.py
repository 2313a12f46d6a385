"""Ranks: everything that knows that a run may be more than one process."""

from .mesh import Mesh, layout_of, mesh_of
from .places import Sliced
from .ranks import Ranks, parallelize
from .world import DecidedElsewhere, World, code_digest

__all__ = ["DecidedElsewhere", "Mesh", "Ranks", "Sliced", "World", "code_digest", "layout_of", "mesh_of", "parallelize"]
