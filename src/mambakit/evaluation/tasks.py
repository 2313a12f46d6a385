"""Tasks of lm-evaluation-harness for our models and for baselines: LAMBADA, HellaSwag, and whatever else it has."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import CheckpointError, load, native
from ..checkpoint.files import TOKENIZER_CONFIG, read_json
from ..decoding import whole_texts
from ..files import UserError, path_of, paths_of, pip_command
from ..progress import say
from .baselines import GZIP, Baseline, open_baseline, open_foreign_with_tokenizer
from .evaluating import place_and_dtype
from .keeping import keep_in_run


@dataclass(frozen=True)
class TaskResult:
    """One figure of one model."""

    model: str
    task: str
    metric: str
    value: float | None
    stderr: float | None
    num_fewshot: int | None
    samples: int | None
    higher_is_better: bool | None


@dataclass(frozen=True)
class TaskEvaluation:
    """Which models were given which tasks, and the figures."""

    checkpoint: str
    models: list[str]
    tasks: list[str]
    limit: int | None
    results: list[TaskResult]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_tasks(
    models: str | Path | Sequence[str | Path],
    tasks: str | Sequence[str],
    *,
    task_paths: Sequence[str | Path] = (),
    baselines: Sequence[str] = (),
    limit: int | None = None,
    num_fewshot: int | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> TaskEvaluation:
    """Give tasks of lm-evaluation-harness to model folders, runs (of which the best checkpoint is taken) and baselines.
    The table of all figures is noted in each run, for its report.

    A task is a name of the harness, or the path of a task file; `task_paths` are folders of task files whose names can
    be used too. A baseline is a model folder or a Hugging Face name; one that is not a Mamba goes through the harness'
    own backend. `limit` takes the first questions of each task, for a quick look.
    """
    given = paths_of(models)
    names = [name for text in ([tasks] if isinstance(tasks, str) else tasks) for name in _split(text)]
    _check_arguments(given, names, baselines, limit, num_fewshot)
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"tasks need lm-evaluation-harness: {pip_command('eval')}")
    place, dtype = place_and_dtype(device, precision)
    if place.type == "xla":
        raise UserError("tasks are not evaluated on xla; use another device")
    folders = [native.find(path_of(model)) for model in given]
    others = [open_baseline(name) for name in paths_of(baselines)]
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the harness' bars are for terminals
    from . import harness

    loaded = harness.load_tasks(names, paths_of(task_paths), num_fewshot)
    results: list[TaskResult] = []
    titles = [*map(str, folders), *(baseline.name for baseline in others)]
    sources: list[Path | Baseline] = [*folders, *others]
    for title, source in zip(titles, sources, strict=True):
        say(f"{title}: {', '.join(loaded['tasks'])}")
        if isinstance(source, Baseline) and not source.is_mamba:
            lm = _open_foreign(source, place, dtype)
        else:
            lm = _open(source.folder if isinstance(source, Baseline) else source, place, dtype)
        results += [TaskResult(title, **figure) for figure in harness.run_tasks(lm, loaded, limit)]
        del lm  # before the next is opened
    found = TaskEvaluation(str(folders[0]), titles, list(loaded["tasks"]), limit, results)
    for model in given:
        keep_in_run(path_of(model), found)
    return found


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _check_arguments(
    models: Sequence[str], tasks: Sequence[str], baselines: Sequence[str], limit: int | None, num_fewshot: int | None
) -> None:
    problems = {
        "there is no model; name a run or a model folder": not models,
        "--tasks is empty; name tasks, such as lambada_openai,hellaswag, or the path of a task file": not any(tasks),
        "--tasks has an empty name; put one comma between two names": any(tasks) and "" in tasks,
        f"the baseline {GZIP} answers no tasks; it is for texts (--data)": GZIP in baselines,
        f"limit={limit}: need at least 1": limit is not None and limit < 1,
        f"num_fewshot={num_fewshot}: need at least 0": num_fewshot is not None and num_fewshot < 0,
    }
    if wrong := [problem for problem, is_wrong in problems.items() if is_wrong]:
        raise UserError("; ".join(wrong))


def _open(folder: Path, place: torch.device, dtype: torch.dtype) -> Any:
    from .harness import HarnessModel

    opened = load(folder)
    if opened.tokenizer is None:
        raise CheckpointError(f"{folder} has no tokenizer.json; tasks are text, and need one")
    tokenizer = whole_texts(opened.tokenizer)
    about = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    begin = tokenizer.token_to_id(about["bos_token"]) if isinstance(about.get("bos_token"), str) else None
    first = begin if begin is not None else next(iter(opened.end_tokens), None)
    if first is None:
        raise CheckpointError(f"{folder} names no eos_token_id, which stands before texts without a context")
    if (
        first >= opened.model.config.padded_vocab_size
        or tokenizer.get_vocab_size() > opened.model.config.padded_vocab_size
    ):
        raise CheckpointError(f"the tokenizer of {folder} has more tokens than its model")
    return HarnessModel(opened.model.to(place), tokenizer, first, opened.end_tokens, dtype)


def _open_foreign(baseline: Baseline, place: torch.device, dtype: torch.dtype) -> Any:
    from .harness import foreign_model

    model, tokenizer = open_foreign_with_tokenizer(baseline.name, baseline.folder)
    return foreign_model(model.to(place).eval(), tokenizer, dtype)
