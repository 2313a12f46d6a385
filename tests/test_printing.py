"""What commands print: plain for programs; on a terminal, prompts stand out and no text steers it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import on_terminal, small_model
from runs import make_corpus

from mambakit.checkpoint import huggingface
from mambakit.cli import main
from mambakit.data.tokenize import bytes_tokenizer

MAMBAKIT = [sys.executable, "-m", "mambakit"]
WILD = ["--temperature", "9", "--max-new-tokens", "600", "--seed", "6", "--device", "cpu"]
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned nothing: it writes all bytes, ESC among them."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("printing") / "model"
    network = small_model("mamba1", vocab_size=257)
    huggingface.write(network, folder, tokenizer=bytes_tokenizer(), end_tokens=[256])
    return folder


@pytest.fixture(scope="module")
def broken(model: Path) -> Path:
    """The same with one weight that is no number."""
    from mambakit import load

    network = load(model).model
    with torch.no_grad():
        network.get_parameter("backbone.layers.0.mixer.out_proj.weight")[0, 0] = torch.nan
    huggingface.write(network, model.parent / "broken", tokenizer=bytes_tokenizer(), end_tokens=[256])
    return model.parent / "broken"


def _piped(*arguments: str) -> str:
    found = subprocess.run([*MAMBAKIT, *arguments], capture_output=True, check=True, timeout=120)
    return found.stdout.decode()


def _seen(*arguments: str, **environment: str) -> str:
    status, seen = on_terminal([*MAMBAKIT, *arguments], **environment)
    assert status == 0, seen
    seen = seen.replace("\r\n", "\n")  # the terminal's own
    return seen.removesuffix("\x1b[0m")  # of numba at the end of a process, where colorama is installed too


def test_a_program_reads_the_text_as_it_is(model: Path) -> None:
    whole = _piped("generate", str(model), "--prompt", "a\x1bb", *WILD)
    assert whole.startswith("a\x1bb") and "\x1b" in whole[3:]
    assert _piped("generate", str(model), "--prompt", "a\x1bb", "--stream", *WILD) == whole


@pytest.mark.parametrize("way", [[], ["--stream"]])
def test_a_terminal_gets_a_bold_prompt_and_no_codes_of_the_texts(model: Path, way: list[str]) -> None:
    seen = _seen("generate", str(model), "--prompt", "a\x1b[2Jb", *way, *WILD)
    assert seen.startswith("\x1b[1ma\ufffd[2Jb\x1b[0m")
    assert not CONTROLS.search(seen.replace("\x1b[1m", "", 1).replace("\x1b[0m", "", 1))
    plain = _seen("generate", str(model), "--prompt", "a\x1b[2Jb", *way, *WILD, NO_COLOR="1")
    assert plain == seen.replace("\x1b[1m", "").replace("\x1b[0m", "")


def test_several_texts_are_told_apart_on_a_terminal(model: Path) -> None:
    options = ["--max-new-tokens", "3", "--seed", "1", "--device", "cpu"]
    seen = _seen("generate", str(model), "--prompt", "one", "two", *options)
    assert re.search("^── 1 of 2 ─+\n\x1b\\[1mone\x1b\\[0m", seen) and re.search("\n\n── 2 of 2 ─+\n\x1b\\[1mtwo", seen)
    assert "──" not in _piped("generate", str(model), "--prompt", "one", "two", *options)


def test_samples_of_an_evaluation_show_where_the_prompt_ends(model: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a\x1b[2J document of many words, and some more words")
    options = ["--data", str(tmp_path / "texts"), "--samples", "1", "--device", "cpu"]
    seen = _seen("evaluate", str(model), *options)
    at = seen.index("── sample 1 of 1 ─")
    assert "\n\x1b[1ma\ufffd[2J document o\x1b[0m" in seen[at:]
    assert not CONTROLS.search(seen[at:].replace("\x1b[1m", "", 1).replace("\x1b[0m", "", 1))
    assert "\na\x1b[2J document o|" in _piped("evaluate", str(model), *options)


@pytest.mark.parametrize(
    "options",
    [[], ["--temperature", "0"], ["--stream"], ["--stream", "--temperature", "0"], ["--prompt", "b", "c"], ["--json"]],
    ids=" ".join,
)
def test_generate_says_that_weights_are_not_finite(
    broken: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(broken), "--prompt", "a", "--device", "cpu", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        r"mambakit: the weights of this model are not finite \(NaN .* out_proj.weight.*\n",
        err.replace("backbone.layers.0.mixer.", ""),
    )


def test_evaluate_says_that_weights_are_not_finite(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = make_corpus(tmp_path / "corpus", 3)
    assert main(["evaluate", str(broken), "--data", str(corpus), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.search(r"^mambakit: the loss of .*broken is nan: its weights are not finite", err, re.M)


def test_a_report_of_no_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 2
    assert (
        capsys.readouterr().err
        == "mambakit: there is nothing to draw; name a run folder, as made by mambakit train --out RUN\n"
    )
