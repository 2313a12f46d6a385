"""The model card of a checkpoint: README.md with what its run has recorded, and its loss as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..files import UserError, read_json
from ..progress import duration, printable
from .markup import DASH, count, decimal
from .plots import loss_picture
from .records import Columns, RunRecord, number, read_run

PICTURE = "loss.svg"
KINDS = {"mamba1": "Mamba", "mamba2": "Mamba-2"}

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- mamba
- mambakit
---

# {name}
"""
USAGE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on Hugging Face
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

```sh
mambakit generate . --prompt "Once upon a time"
mambakit evaluate . --data TEXT
mambakit train --data TEXT --init-from . --out tuned
```
"""


def model_card(run: Path, step: int) -> dict[str, str]:
    """README.md and the picture in it, by name. Of paths, the last name alone is told: a card is read by others."""
    record = read_run(run)
    picture = loss_picture(record)
    lines = [HEAD.format(name=_cell(record.name)), *_figures(record, step)]
    if picture is not None:
        lines += ["## Loss", "", f"![loss of training and validation]({PICTURE})", ""]
        lines += ["Line: training. Dots: validation, on documents that were held out.", ""]
    lines += [*_evaluations(record, f"step_{step:08d}"), USAGE]
    text = "\n".join(lines).encode("utf-8", "replace").decode()  # a name may be no UTF-8
    return {"README.md": text, **({PICTURE: picture} if picture is not None else {})}


def _figures(record: RunRecord, step: int) -> Iterator[str]:
    """What was trained, on what, for how long, and how well it does."""
    tokens = _at(record.train, "tokens", step)
    rows: dict[str, str] = {}
    try:
        model = ModelConfig(**record.config["model"])
    except (KeyError, TypeError, ValueError, ArithmeticError):
        yield from ("A language model, trained with mambakit.", "")
    else:
        kind, size = KINDS.get(model.kind, model.kind), f"{model.num_parameters():,} parameters"
        yield from (f"A {kind} language model of {size}, trained with mambakit.", "")
        rows["Model"] = f"{kind}, d_model {model.d_model}, {model.num_layers} layers"
        rows["Parameters"] = f"{model.num_parameters():,}"
        rows["Vocabulary"] = f"{model.vocab_size:,} tokens"
    rows["Data"] = "; ".join(_data(record)) or DASH
    rows["Tokens seen"] = _counted(tokens)
    rows["Epochs"] = decimal(_at(record.train, "epoch", step))
    rows["Steps"] = count(step)
    rows["Sequence length"] = _counted(number(_section(record, "data").get("sequence_length")))
    rows["Tokens in a step"] = _counted(number(_section(record, "train").get("batch_tokens")))
    optim = _section(record, "optim")
    rows["Optimizer"] = {"adamw": "AdamW", "muon": "Muon"}.get(str(optim.get("name", "adamw")), DASH) if optim else DASH
    rows["Peak learning rate"] = f"{number(optim.get('lr')):g}".replace("nan", DASH)
    rows["Training time"] = _seconds(record, step)
    rows["Trained on"] = ", then ".join(_devices(record)) or DASH
    rows["Validation loss"] = decimal(_at(record.evals, "loss", step))
    rows["Validation bits per byte"] = decimal(_at(record.evals, "bits_per_byte", step))
    yield from _table(["", ""], [[name, value] for name, value in rows.items() if value != DASH])


def _data(record: RunRecord) -> Iterator[str]:
    """The shards that were trained on, by the last name of each, with their counts where they are still there."""
    used = [history["data"] for history in record.history if isinstance(history.get("data"), list)]
    for path in used[-1] if used else ():
        name = _last_name(path)
        try:
            train = read_json(Path(str(path)) / "index.json")["counts"]["train"]
            yield f"{name}: {train['documents']:,} documents, {train['tokens']:,} tokens"
        except (UserError, KeyError, TypeError, ValueError, OSError):
            yield name


def _devices(record: RunRecord) -> list[str]:
    return list(dict.fromkeys(_cell(history["device"]) for history in record.history if history.get("device")))


def _evaluations(record: RunRecord, checkpoint: str) -> Iterator[str]:
    """What `mambakit evaluate` has measured of this checkpoint."""
    header = ["data", "model", "loss", "perplexity", "bits per byte", "bytes of text"]
    rows: list[list[str]] = []
    tasks: list[list[str]] = []
    for evaluation in record.evaluations:
        results = evaluation.get("results")
        if _last_name(evaluation.get("checkpoint")) != checkpoint or not isinstance(results, list):
            continue
        if "tasks" in evaluation:
            tasks += _task_rows(evaluation, results)
            continue
        data = evaluation.get("data")
        names = ", ".join(_last_name(path) for path in (data if isinstance(data, list) else [data]))
        if evaluation.get("split"):
            names += f" ({_cell(evaluation['split'])})"
        for result in (found for found in results if isinstance(found, dict)):
            is_this = result.get("model") == evaluation.get("checkpoint")
            model = "this model" if is_this else _last_name(result.get("model"))
            figures = [decimal(number(result.get(key))) for key in ("loss", "perplexity", "bits_per_byte")]
            rows.append([names, model, *figures, _counted(number(result.get("bytes")))])
    if rows or tasks:
        yield from ("## Evaluation", "")
    if rows:
        yield from _table(header, rows)
    if tasks:
        yield from _table(["task", "examples", "questions", "metric", "model", "value"], tasks)


def _task_rows(evaluation: Mapping[str, Any], results: Sequence[Any]) -> Iterator[list[str]]:
    """Figures of lm-evaluation-harness, with standard errors."""
    for result in (found for found in results if isinstance(found, dict)):
        is_this = result.get("model") == evaluation.get("checkpoint")
        error = number(result.get("stderr"))
        yield [
            _cell(result.get("task")),
            *(_counted(number(result.get(key))) for key in ("num_fewshot", "samples")),
            _cell(result.get("metric")),
            "this model" if is_this else _last_name(result.get("model")),
            decimal(number(result.get("value"))) + ("" if math.isnan(error) else f" ± {decimal(error)}"),
        ]


def _at(columns: Columns, key: str, step: int) -> float:
    """The last value that was recorded up to a step."""
    found = [
        value for at, value in zip(columns["step"], columns[key], strict=True) if at <= step and not math.isnan(value)
    ]
    return found[-1] if found else math.nan


def _seconds(record: RunRecord, step: int) -> str:
    if not record.has_time:
        return DASH
    steps = zip(record.train["step"], record.seconds, strict=True)
    return duration(max((seconds for at, seconds in steps if at <= step), default=0.0))


def _section(record: RunRecord, name: str) -> Mapping[str, Any]:
    found = record.config.get(name)
    return found if isinstance(found, dict) else {}


def _counted(value: float) -> str:
    return DASH if math.isnan(value) else count(value)


def _last_name(path: object) -> str:
    """Without the folders above it, which are nobody else's business; hf:NAME and gzip stay as they are."""
    text = str(path)
    return _cell(Path(text).name if text.startswith(("/", ".", "~")) else text)


def _cell(value: object) -> str:
    """Text that Markdown takes as it is, in a table too."""
    return printable(str(value)).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"| {' | '.join('---' for _ in header)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
