"""Files of weights: models in all formats, and the state of a run."""

from . import native
from .converting import convert, save
from .files import CheckpointError
from .loading import ModelFolder, load

__all__ = ["CheckpointError", "ModelFolder", "convert", "load", "native", "save"]
