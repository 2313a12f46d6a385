"""How well a model predicts a text, beside other models."""

from .evaluating import SAMPLE_ROWS, Evaluation, evaluate, keep_in_run
from .scoring import Score, score

__all__ = ["SAMPLE_ROWS", "Evaluation", "Score", "evaluate", "keep_in_run", "score"]
