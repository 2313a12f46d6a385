"""Files of weights: reading and writing models in Hugging Face's and state-spaces' forms."""

from . import native
from .converting import convert, save
from .files import CheckpointError
from .loading import ModelFolder, load

__all__ = ["CheckpointError", "ModelFolder", "convert", "load", "native", "save"]
