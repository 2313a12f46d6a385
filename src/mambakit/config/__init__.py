"""Every setting, its default and its checks. Imports no torch, so that a wrong setting is told at once."""

from .base import ConfigError, Settings
from .growth import Growth
from .mixers import Mamba1Dims, Mamba2Dims
from .model import UNKNOWN_VOCABULARY, ModelConfig
from .reading import read_config, read_run_config, read_yaml, write_yaml
from .resolving import resolve
from .sections import (
    SECTIONS,
    DataConfig,
    GuardConfig,
    LoraConfig,
    OptimConfig,
    ParallelConfig,
    PrepareConfig,
    Recompute,
    RunConfig,
    TrainConfig,
    problems_with_fp8,
)

__all__ = [
    "SECTIONS",
    "UNKNOWN_VOCABULARY",
    "ConfigError",
    "DataConfig",
    "Growth",
    "GuardConfig",
    "LoraConfig",
    "Mamba1Dims",
    "Mamba2Dims",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrepareConfig",
    "Recompute",
    "RunConfig",
    "Settings",
    "TrainConfig",
    "problems_with_fp8",
    "read_config",
    "read_run_config",
    "read_yaml",
    "resolve",
    "write_yaml",
]
