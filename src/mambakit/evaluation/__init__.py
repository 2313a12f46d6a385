"""How well a model predicts a text, and how well it answers tasks, beside other models."""

from .evaluating import SAMPLE_ROWS, Evaluation, evaluate
from .keeping import keep_in_run
from .scoring import Score, score
from .tasks import TaskEvaluation, evaluate_tasks

__all__ = ["SAMPLE_ROWS", "Evaluation", "Score", "TaskEvaluation", "evaluate", "evaluate_tasks", "keep_in_run", "score"]
