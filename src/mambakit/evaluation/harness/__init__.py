"""lm-evaluation-harness: our models as its models, and its tasks, from itself or from local files. The only place that
imports it (the extra `eval`)."""

from .lm import HarnessModel, foreign_model
from .loading import load_tasks
from .running import run_tasks

__all__ = ["HarnessModel", "foreign_model", "load_tasks", "run_tasks"]
