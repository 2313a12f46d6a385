"""Training: a run is opened (new or from a checkpoint), then one loop takes it to its end."""

from .run import train, training_steps

__all__ = ["train", "training_steps"]
