"""Runs the tasks of the harness, and takes the figures out of its results."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from jinja2 import TemplateError
from lm_eval import evaluator

from ...files import UserError
from .loading import Loaded
from .quiet import quiet

BOOTSTRAPS = 1000  # samples for the standard error of a perplexity; the harness' own 100,000 take minutes
SEED = 1234


def run_tasks(lm: Any, loaded: Loaded, limit: int | None) -> Iterator[dict[str, Any]]:
    """A figure at a time: task, metric, value, standard error where there is one, examples, questions, direction."""
    random.seed(SEED)
    np.random.seed(SEED)
    with quiet():
        try:
            found = evaluator.evaluate(
                lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
            )
        except UserError:
            raise
        except (ValueError, KeyError, TemplateError) as error:  # a template of a task, or its data
            raise UserError(f"the tasks cannot be run: {str(error).strip().splitlines()[0]}") from error
    for task, figures in found["results"].items():
        for key, value in figures.items():
            metric, _, kind = key.partition(",")  # with the filter of answers that it is computed after
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = figures.get(f"{metric}_stderr,{kind}")
            yield {
                "task": task,
                "metric": metric if kind == "none" else f"{metric} ({kind})",
                "value": float(value) if math.isfinite(value) else None,
                "stderr": float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None,
                "num_fewshot": found["n-shot"].get(task),
                "samples": found["n-samples"].get(task, {}).get("effective", figures.get("sample_len")),
                "higher_is_better": found["higher_is_better"].get(task, {}).get(metric),
            }
