"""The network: parameters, initialization, forward pass and decoding step. Knows no device, rank or file."""

from .lm import MambaLM, Output, StepOutput
from .state import LayerState, State

__all__ = ["LayerState", "MambaLM", "Output", "State", "StepOutput"]
