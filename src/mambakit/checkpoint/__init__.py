"""Files of weights: reading and writing models in Hugging Face's and state-spaces' forms."""

from . import native
from .converting import convert, save
from .files import CheckpointError
from .loading import LoadedModel, load

__all__ = ["CheckpointError", "LoadedModel", "convert", "load", "native", "save"]
