"""Tasks by name, from the harness itself, or from task files of a person's own.

A task file is read as plain data. In the harness' own files, `!function` names Python code that is then run; a local
file that has it is refused, and so are metrics that are programs of their own. Templates, which every task has, run in
Jinja's sandbox.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.api.metrics  # noqa: F401 - fills the registry
from jinja2 import Environment, Template
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import utils
from lm_eval.api.registry import metric_registry
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex

from ...config import read_yaml
from ...files import UserError, path_of
from ...progress import say
from .quiet import quiet

LARGEST_FILE = 2**20
SUFFIXES = (".yaml", ".yml")
FEWSHOT_SEED = 1234  # the harness' own
Config = dict[str, Any]  # of a task or a group
Loaded = dict[str, dict[str, Any]]  # tasks, groups and group_map, as the harness has them


def load_tasks(names: Sequence[str], folders: Sequence[str], num_fewshot: int | None) -> Loaded:
    """The tasks with their data. A name is one of the harness, one of a task file in `folders`, or the path of a task
    file or of a folder of them."""
    _use_sandbox()
    local: dict[str, Config] = {}  # by the names of their tasks and groups
    for folder in folders:
        local |= _read_folder(path_of(folder))
    wanted: list[str] = []
    for name in names:
        path = path_of(name)
        if name not in local and (path.suffix in SUFFIXES or path.is_file()):
            found = {_title(config): config for config in [_read_file(path)]}
        elif name not in local and path.is_dir():
            found = _read_folder(path)
        else:
            wanted.append(name)
            continue
        local |= found
        wanted += found
    manager = _manager(wanted, local)
    loaded: Loaded = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in wanted:
        for part, found in _load(manager, name).items():
            loaded[part] |= found
    for name, task in loaded["tasks"].items():
        _set_fewshot(name, task, num_fewshot)
    return loaded


def _manager(wanted: Sequence[str], local: dict[str, Config]) -> Any:
    """Knows local tasks, and those of the harness where one of them is wanted: to read their list takes seconds."""
    members = [name for task in wanted if task in local for name in _members(local[task])]
    foreign = [name for name in (*wanted, *members) if name not in local]
    if foreign:
        say("reading the list of lm-eval's tasks")
    with quiet():
        manager = TaskManager(include_defaults=bool(foreign))
    for name, config in local.items():
        manager.task_index.pop(name, None)
        TaskIndex.process_cfg(config, None, manager.task_index)
    for name in foreign:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.task_index, n=1)
            hint = f"did you mean {near[0]}?" if near else "give one of lm-eval's, or the path of a task file (.yaml)"
            raise UserError(f"there is no task {name!r}; {hint}")
    return manager


def _members(config: Config) -> list[str]:
    members = config.get("task")
    return [name for name in members if isinstance(name, str)] if isinstance(members, list) else []


def _load(manager: Any, name: str) -> Loaded:
    try:
        with quiet():
            found: Loaded = manager.load([name])
        return found
    except UserError:
        raise
    except Exception as error:  # of many kinds
        raise UserError(f"the task {name} cannot be used: {_why(error)}") from None


def _why(error: BaseException) -> str:
    """In one sentence; without a network, that."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    words = ("connection", "offline", "timeout", "resolve", "network", "proxy", "localentrynotfound")
    if any(word in type(each).__name__.lower() or word in str(each).lower() for each in chain for word in words):
        return (
            "its data is on Hugging Face, which cannot be reached from here; without a network, give a task file "
            "whose data is on this machine (docs/evaluation.md)"
        )
    first = chain[0]
    return str(first).strip().splitlines()[0] if str(first).strip() else type(first).__name__


def _set_fewshot(name: str, task: Any, num_fewshot: int | None) -> None:
    default = task.get_config("num_fewshot")
    if num_fewshot is None:
        task.set_config(key="num_fewshot", value=default or 0)
    elif default == 0 and num_fewshot:
        say(f"{name} has no examples before its questions by its own rules; --num-fewshot {num_fewshot} does not count")
    else:
        task.set_config(key="num_fewshot", value=num_fewshot)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)


class _Templates(SandboxedEnvironment):
    """Templates that reach no attribute that leads to Python itself. Each is compiled once, not for every question."""

    def __init__(self, like: Environment) -> None:
        super().__init__(undefined=like.undefined, keep_trailing_newline=like.keep_trailing_newline)
        self.filters |= like.filters
        self.compiled: dict[str, Template] = {}

    def from_string(self, source: Any, *others: Any, **named: Any) -> Template:
        if source not in self.compiled:
            self.compiled[source] = super().from_string(source, *others, **named)
        return self.compiled[source]


def _use_sandbox() -> None:
    if not isinstance(utils.env, _Templates):
        utils.env = _Templates(utils.env)


def _read_folder(folder: Path) -> dict[str, Config]:
    """The tasks and groups of a folder's files, by their names."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder of task files")
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    if not files:
        raise UserError(f"{folder} has no task files; need .yaml files with a task in each")
    configs = [_read_file(path, is_part=True) for path in files]
    return {title: config for config in configs if (title := _title(config))}


def _title(config: Config) -> str:
    """The name of a group or a task; none for what is only included by others."""
    name = config.get("group", config.get("task"))
    return name if isinstance(name, str) else ""


def _read_file(path: Path, *, is_part: bool = False) -> Config:
    """A task file as data, with what it includes. `is_part`: it may also be one that others include."""
    config = _merged(path, ())
    if not _title(config) and not is_part:
        raise UserError(f"{path} names no task; need the line `task: NAME`")
    return _checked(config, path)


def _checked(config: Config, path: Path) -> Config:
    """A task without code, whose files of data are found beside the task file; of a group, each of its tasks."""
    if "class" in config:
        raise UserError(f"{path} names a Python class, which is code; mambakit runs no code of task files")
    for metric in config.get("metric_list") or []:
        name = metric.get("metric") if isinstance(metric, dict) else metric
        if not isinstance(metric, dict) or metric.get("hf_evaluate") or name not in metric_registry:
            raise UserError(f"{path} has the metric {name!r}, which is none of lm-eval's own; others are programs")
    if isinstance(members := config.get("task"), list):
        return {**config, "task": [_checked(one, path) if isinstance(one, dict) else one for one in members]}
    options = dict(config.get("dataset_kwargs") or {})
    options.pop("trust_remote_code", None)
    for key in ("data_files", "data_dir"):
        if key in options:
            options[key] = _found_beside(options[key], path)
    return {**config, "dataset_kwargs": options} if options else config


def _merged(path: Path, including: tuple[Path, ...]) -> Config:
    path = path.resolve()
    if path in including:
        raise UserError(f"{path} includes itself")
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path} has {path.stat().st_size} bytes; need a task file of at most a million")
        config = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the task file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        if "for the tag" in str(error):
            why = "it has a tag such as !function, which names Python code; mambakit runs no code of task files"
            raise UserError(f"{path} is refused: {why}") from None
        raise UserError(f"the task file {path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is no task file; need lines such as `task: NAME`")
    included = config.pop("include", [])
    whole: Config = {}
    for name in included if isinstance(included, list) else [included]:
        whole |= _merged(path.parent / str(name), (*including, path))
    return whole | config


def _found_beside(files: Any, path: Path) -> Any:
    if isinstance(files, dict):
        return {split: _found_beside(some, path) for split, some in files.items()}
    if isinstance(files, list):
        return [_found_beside(some, path) for some in files]
    name = str(files)
    if "://" in name or any(sign in name for sign in "*?["):
        return name
    file = path.resolve().parent / path_of(name)
    if not file.exists():
        raise UserError(f"{path} names the data {name}, but {file} does not exist")
    return str(file)
