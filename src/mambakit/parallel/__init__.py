"""Ranks: everything that knows that a run may be more than one process."""

from .mesh import Mesh, layout_of, mesh_of
from .places import Sliced
from .ranks import Ranks, clip_factor, parallelize
from .world import DecidedElsewhere, World, code_digest

__all__ = [
    "DecidedElsewhere",
    "Mesh",
    "Ranks",
    "Sliced",
    "World",
    "clip_factor",
    "code_digest",
    "layout_of",
    "mesh_of",
    "parallelize",
]
