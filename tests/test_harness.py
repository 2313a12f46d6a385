"""lm-evaluation-harness: our models in it give what its own Hugging Face backend gives; task files are data, not code."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import small_model
from runs import WORDS, make_shards
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from mambakit.checkpoint import huggingface
from mambakit.cli import main
from mambakit.cli.commands import evaluate
from mambakit.evaluation import evaluate_tasks
from mambakit.evaluation.baselines import open_foreign_with_tokenizer
from mambakit.evaluation.evaluating import place_and_dtype
from mambakit.files import UserError

pytest.importorskip("lm_eval", reason="make test-lm-eval installs it")
pytestmark = pytest.mark.filterwarnings("default")  # the harness and its libraries have some

TEXT = """
task: last_word
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: multiple_choice
test_split: test
fewshot_split: test
doc_to_text: "{{question}}\\nanswer:"
doc_to_target: right
doc_to_choice: answers
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
WHOLE = """
include: part.yaml
task: whole
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
PART = """
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
"""
WRITTEN = """
include: part.yaml
task: written
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["e"], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
GROUP = """
group: both
task: [last_word, choices]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files, their data, and models of both kinds."""
    import datasets

    place = tmp_path_factory.mktemp("harness")
    datasets.config.HF_DATASETS_CACHE = str(place / "cache")
    shards = make_shards(place / "corpus")
    tokenizer = Tokenizer.from_file(str(shards / "tokenizer.json"))
    for kind in ("mamba1", "mamba2"):
        groups = {"num_groups": 1} if kind == "mamba2" else {}
        network = small_model(kind, vocab_size=300, **groups)
        huggingface.write(network, place / kind, tokenizer=tokenizer, end_tokens=[0])
    tasks = place / "tasks"
    tasks.mkdir()
    files = {"text": TEXT, "choices": CHOICES, "whole": WHOLE, "part": PART, "written": WRITTEN, "group": GROUP}
    for name, content in files.items():
        (tasks / f"{name}.yaml").write_text(content)
    with (tasks / "questions.jsonl").open("w") as file:
        for number in range(24):
            words = WORDS[number % len(WORDS)]
            record = {
                "text": f"{' '.join(words.split() * (1 + number % 5))} {words}",
                "question": f"{words}, and then {number} times: {words * (1 + number % 3)}",
                "answers": [WORDS[(number + i) % len(WORDS)][: 6 + i] for i in range(4)],
                "right": number % 4,
            }
            file.write(json.dumps(record) + "\n")
    return place


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def by_their_backend(model: Path, names: list[str], num_fewshot: int | None = None) -> dict[tuple[str, str], float]:
    from mambakit.evaluation import harness

    place, dtype = place_and_dtype("cpu", "fp32")
    network, tokenizer = open_foreign_with_tokenizer("theirs", model)
    lm = harness.foreign_model(network.to(place).eval(), tokenizer, dtype)
    loaded = harness.load_tasks(names, [], num_fewshot)
    return {(each["task"], each["metric"]): each["value"] for each in harness.run_tasks(lm, loaded, None)}


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_figures_are_those_of_the_harness_own_backend(kind: str, folder: Path) -> None:
    names = [str(folder / f"tasks/{name}.yaml") for name in ("text", "choices", "whole", "written")]
    found = evaluate_tasks(folder / kind, names, device="cpu")
    ours = {(result.task, result.metric): result.value for result in found.results}
    theirs = by_their_backend(folder / kind, names)
    assert ours.keys() == theirs.keys() and len(ours) == 7
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert {task for task, _ in ours} == {"last_word", "choices", "whole", "written"}
    errors = {(result.task, result.metric) for result in found.results if result.stderr is not None}
    assert {("choices", "acc"), ("last_word", "acc"), ("last_word", "perplexity")} <= errors
    assert {result.samples for result in found.results} == {24}


def test_generated_texts_are_those_of_the_harness_own_backend(folder: Path) -> None:
    from lm_eval.api.instance import Instance

    from mambakit.evaluation import harness
    from mambakit.evaluation.tasks import _open

    place, dtype = place_and_dtype("cpu", "fp32")
    network, tokenizer = open_foreign_with_tokenizer("theirs", folder / "mamba2")
    theirs = harness.foreign_model(network, tokenizer, dtype)
    options = {"until": ["the", "\n"], "max_gen_toks": 12, "do_sample": False}
    # One length: transformers' Mamba reads padding as if it were text.
    asked = [
        Instance("generate_until", {}, (prompt, options), number)
        for number, prompt in enumerate(["the cat sat", "the dog sat", "a dog ran", "the cat sat"])
    ]
    ours = _open(folder / "mamba2", place, dtype).generate_until(asked)
    assert ours == [theirs.generate_until([one])[0] for one in asked]
    assert ours[0] == ours[3] and any(ours)


def test_several_models_and_a_baseline_stand_in_one_table(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, eos_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    (tmp_path / "llama/tokenizer.json").write_bytes((folder / "mamba1/tokenizer.json").read_bytes())
    models = [str(folder / "mamba1"), str(folder / "mamba2")]
    words = ["evaluate", *models, "--tasks", "choices,last_word", "--task-path", str(folder / "tasks"), "--limit", "8"]
    words += ["--baseline", str(tmp_path / "llama"), "--device", "cpu"]
    assert main([*words, "--num-fewshot", "2"]) == 0
    table = capsys.readouterr().out
    assert table.count("±") >= 3 * 3 and "acc_norm ↑" in table and "perplexity ↓" in table
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"] == [*models, str(tmp_path / "llama")] and found["limit"] == 8
    assert len(found["results"]) == 3 * 4 and {result["samples"] for result in found["results"]} == {8}


def test_the_examples_of_the_help_with_task_files_run(
    finished: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With questions of ours in the task files that they name, and in the example of examples/."""
    commands = re.findall(r"^ *mambakit (evaluate run .*my-tasks.*)$", inspect.getdoc(evaluate) or "", re.M)
    assert len(commands) == 2
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(folder / "tasks", tmp_path / "my-tasks")
    (tmp_path / "my-tasks/mine.yaml").write_text(CHOICES.replace("choices", "mine", 1))
    lambada = Path(__file__).parents[1] / "examples/tasks/lambada.yaml"
    shutil.copy(lambada, tmp_path / "my-tasks")
    shutil.copy(folder / "tasks/questions.jsonl", tmp_path / "my-tasks/lambada_test.jsonl")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert main(command.split()) == 0
    assert len((tmp_path / "run/evaluations.jsonl").read_text().splitlines()) == 2


def test_examples_stand_before_the_questions(folder: Path) -> None:
    name = str(folder / "tasks/choices.yaml")
    none, two = (evaluate_tasks(folder / "mamba2", name, num_fewshot=n, device="cpu").results[0] for n in (0, 2))
    assert (none.num_fewshot, two.num_fewshot) == (0, 2)
    assert by_their_backend(folder / "mamba2", [name], 2)["choices", "acc"] == pytest.approx(two.value)


def test_a_group_of_local_tasks(folder: Path) -> None:
    found = evaluate_tasks(folder / "mamba2", "both", task_paths=[folder / "tasks"], device="cpu")
    assert found.tasks == ["last_word", "choices"]
    assert "both" in {result.task for result in found.results}


def test_the_table_is_kept_in_the_run_and_drawn(finished: Path, folder: Path, tmp_path: Path) -> None:
    from mambakit.reporting import report

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    found = evaluate_tasks(run, str(folder / "tasks/choices.yaml"), device="cpu", limit=8)
    (line,) = (run / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line)["results"] == [vars(result) for result in found.results]
    page = report(run).read_text()
    assert "<h2>Evaluations</h2>" in page and "acc_norm ↑" in page and " ± " in page and "the first 8 questions" in page


def test_templates_reach_nothing_but_the_question(folder: Path, tmp_path: Path) -> None:
    _task(
        tmp_path,
        folder,
        lambda text: text.replace("{{question}}", "{{question.__class__.__mro__[1].__subclasses__()}}"),
    )
    with pytest.raises(UserError, match="access to attribute .__class__. of .str. object is unsafe"):
        evaluate_tasks(folder / "mamba2", str(tmp_path / "task.yaml"), device="cpu")


def _task(place: Path, folder: Path, change: Callable[[str], str]) -> None:
    (place / "task.yaml").write_text(change(CHOICES.replace("questions.jsonl", str(folder / "tasks/questions.jsonl"))))


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that code of a task would write."""
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef process(docs):\n    return docs\n")
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("process_docs: !function code.process", "names Python code; mambakit runs no code of task files"),
        ("process_docs: !func%74ion code.process", "names Python code"),
        ("process_docs: !<!function> code.process", "names Python code"),
        ("process_docs: !!python/name:os.system", "names Python code"),
        ("include: other.yaml", "other.yaml is refused: it has a tag such as !function"),
        ("class: code.process", "names a Python class, which is code"),
        ("unsafe_code: true", "marked as unsafe"),
        ("include: nowhere.yaml", "nowhere.yaml cannot be read: No such file or directory"),
        ("include: task.yaml", "includes itself"),
        ("task: twice", "cannot be read"),
        ("[", "cannot be read"),
    ],
)
def test_task_files_are_data(added: str, message: str, folder: Path, tmp_path: Path, marker: Path) -> None:
    (tmp_path / "other.yaml").write_text("process_docs: !function code.process\n")
    _task(tmp_path, folder, lambda text: text + added + "\n")
    with pytest.raises(UserError, match=message):
        evaluate_tasks(folder / "mamba2", str(tmp_path / "task.yaml"), device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("metric: acc_norm", "metric: accuracy"), "'accuracy', which is none of lm-eval's own"),
        (lambda text: text.replace("metric: acc,", "metric: acc, hf_evaluate: true,"), "none of lm-eval's own"),
        (lambda text: text.replace("questions.jsonl", "nothing.jsonl"), "nothing.jsonl does not exist"),
        (lambda text: text.replace("test_split: test", "test_split: other"), "the task .* cannot be used"),
        (lambda text: text.replace("dataset_path: json", "dataset_path: some/where"), "without a network, give a task file"),
        (lambda text: "- a list", "is no task file"),
        (lambda text: text.replace("task: choices", ""), "names no task"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_task_file_is_told(
    change: Callable[[str], str], message: str, folder: Path, tmp_path: Path
) -> None:
    _task(tmp_path, folder, change)
    with pytest.raises(UserError, match=message):
        evaluate_tasks(folder / "mamba2", str(tmp_path / "task.yaml"), device="cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "lambada_opnai"], "there is no task 'lambada_opnai'; did you mean lambada_openai?"),
        (["--tasks", ""], "--tasks is empty"),
        (["--tasks"], "--tasks is empty"),
        (["--tasks", "a,,b"], "--tasks has an empty name"),
        (["--tasks", "a", "--data", "x"], "--data is for texts, and --tasks for tasks"),
        (["--tasks", "a", "--limit", "0"], "limit=0: need at least 1"),
        (["--tasks", "a", "--baseline", "gzip"], "gzip answers no tasks"),
        (["--data", "x", "--limit", "3"], "--limit is for tasks; name them with --tasks"),
        (["--tasks", "a", "--task-path", "nowhere"], "nowhere is not a folder of task files"),
        (["--tasks", "a", "--precision", "fp16", "--device", "cpu"], "precision=fp16 needs a CUDA GPU"),
    ],
)
def test_mistakes_are_told(words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(folder / "mamba2"), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_told(folder: Path, tmp_path: Path) -> None:
    for name in os.listdir(folder / "mamba2"):
        if name != "tokenizer.json":
            (tmp_path / name).write_bytes((folder / "mamba2" / name).read_bytes())
    with pytest.raises(UserError, match="has no tokenizer.json; tasks are text, and need one"):
        evaluate_tasks(tmp_path, str(folder / "tasks/choices.yaml"), device="cpu")


def test_the_harness_missing_names_its_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(UserError, match=r"tasks need lm-evaluation-harness: pip install '.*\[eval\]'"):
        evaluate_tasks(folder / "mamba2", "lambada_openai", device="cpu")
