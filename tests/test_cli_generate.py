"""`mambakit generate`: prompts from files and pipes, states on disk, and turns with a person on a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_model
from safetensors.torch import load_file

from mambakit import load
from mambakit.checkpoint import huggingface
from mambakit.cli import main
from mambakit.data.tokenize import bytes_tokenizer
from mambakit.files import UserError

FLAGS = ["--device", "cpu", "--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned nothing."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("generate") / "model"
    network = small_model("mamba2", vocab_size=257)
    huggingface.write(network, place, tokenizer=bytes_tokenizer(), end_tokens=[256])
    huggingface.write(network, place.parent / "endless", tokenizer=bytes_tokenizer(), end_tokens=[])
    return place


def _lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["generate", *words, *FLAGS, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def _result(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["generate", *words, "--device", "cpu", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    return str(result["text"])


def _from_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_file_gives_what_its_prompts_give_alone_at_any_batch_size(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["one", "a much longer prompt, of many bytes", "x", " begins with a space", "naïve 🐭"]
    (tmp_path / "prompts.txt").write_bytes("\r\n".join([prompts[0], "", *prompts[1:], ""]).encode())
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "id": 1}) + "\n" for p in prompts))
    words = [str(folder), "--seed", "5", "--prompts"]
    found = _lines(capsys, *words, str(tmp_path / "prompts.txt"))
    assert [each["prompt"] for each in found] == prompts
    for size in ("1", "2", "100"):
        assert _lines(capsys, *words, str(tmp_path / "prompts.jsonl"), "--batch-size", size) == found
    capsys.readouterr()
    assert main(["generate", str(folder), "--seed", "5", "--prompt", *prompts, *FLAGS, "--json"]) == 0
    together = json.loads(capsys.readouterr().out)["results"]
    assert together == [{"prompt": each["prompt"], "text": each["text"]} for each in found]
    assert all(each["tokens"] == 8 and each["finish_reason"] == "length" for each in found)
    assert [each["prompt_tokens"] for each in found] == [len(p.encode()) for p in prompts]


def test_rows_that_end_early_make_room_for_the_next(folder: Path) -> None:
    loaded = load(folder)
    prompts = [f"prompt {i}" for i in range(12)]
    options: dict[str, Any] = {"seed": 3, "max_new_tokens": 40, "stop_strings": list("aeiou"), "temperature": 2.0}
    found = {each.row: each for each in loaded.continue_texts(prompts, batch_size=3, **options)}
    assert [found[row].text for row in range(12)] == loaded.generate(prompts, **options)
    assert {each.finish_reason for each in found.values()} == {"stop", "length"}
    assert all(each.tokens == 40 for each in found.values() if each.finish_reason == "length")


def test_an_end_token_ends_a_row_and_is_not_counted(folder: Path) -> None:
    loaded = load(folder)
    with torch.no_grad():
        loaded.model.backbone.embedding.weight[256] *= 30
    found = list(loaded.continue_texts(["a", "b", "c", "d"], batch_size=2, seed=1, max_new_tokens=300))
    assert all(each.finish_reason == "stop" and 0 <= each.tokens < 300 for each in found)
    assert all(len(each.text) <= each.tokens for each in found)
    assert [each.tokens for each in loaded.continue_texts(["a", "b"], max_new_tokens=0)] == [0, 0]


def test_standard_input_takes_the_place_of_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _from_stdin(monkeypatch, b"one\ntwo\n")
    found = _lines(capsys, str(folder), "--seed", "5")
    assert [each["prompt"] for each in found] == ["one", "two"]
    _from_stdin(monkeypatch, b'{"prompt": "one"}\n{"prompt": "two"}\n')
    assert _lines(capsys, str(folder), "--seed", "5", "--prompts", "-") == found
    _from_stdin(monkeypatch, b'{"a": 1}\n')  # some other text
    assert [each["prompt"] for each in _lines(capsys, str(folder))] == ['{"a": 1}']


def test_texts_of_a_file_look_as_those_of_flags(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p").write_text("one\ntwo\n")
    assert main(["generate", str(folder), "--prompt", "one", "two", "--seed", "1", *FLAGS]) == 0
    expected = capsys.readouterr().out
    assert main(["generate", str(folder), "--prompts", str(tmp_path / "p"), "--seed", "1", *FLAGS]) == 0
    told = capsys.readouterr()
    assert told.out == expected
    assert "generating: done" in told.err


MISTAKES = {
    "empty file": (["--prompts", "empty"], "empty has no prompt; give one with --prompt TEXT"),
    "missing file": (["--prompts", "nowhere"], "--prompts nowhere does not exist"),
    "folder": (["--prompts", "."], "--prompts . does not exist, or is no file"),
    "no name": (["--prompts", ""], "--prompts is empty"),
    "bad line": (["--prompts", "bad.jsonl"], "bad.jsonl, line 3: is not valid JSON"),
    "no prompt": (["--prompts", "other.jsonl"], 'other.jsonl, line 1: need a JSON object with a text as "prompt"'),
    "encoding": (["--prompts", "latin"], "latin, line 2: is not UTF-8"),
    "both": (["--prompts", "empty", "--prompt", "a"], "both --prompt and --prompts are given"),
    "two to save": (["--prompt", "a", "b", "--save", "x"], "--save and --restore are for one text"),
    "file to save": (["--prompts", "bad.jsonl", "--save", "x"], "--save is for one text"),
    "stream of a file": (["--prompts", "bad.jsonl", "--stream"], "--stream is for one text"),
    "nothing to restore": (["--prompt", "a", "--restore", "nowhere"], "nowhere does not exist"),
    "no row": (["--prompt", "a", "--restore", "bad.jsonl"], "bad.jsonl is no saved row"),
    "existing": (["--prompt", "a", "--save", "empty"], "--save empty exists"),
    "batch": (["--prompts", "good", "--batch-size", "0"], "batch_size=0: need at least 1"),
    "setting": (["--prompts", "good", "--top-p", "3"], "top_p=3.0"),
    "nothing": ([], "standard input has no prompt; give one with --prompt TEXT"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_message(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _from_stdin(monkeypatch, b"")
    contents = {
        "empty": b"\n \n", "good": b"a\n", "latin": b"a\n\xe4\n",
        "bad.jsonl": b'{"prompt": "a"}\n\n{"prompt": \n', "other.jsonl": b'{"text": "a"}\n',
    }  # fmt: skip
    for file, content in contents.items():
        (tmp_path / file).write_bytes(content)
    words, message = MISTAKES[name]
    assert main(["generate", str(folder), *words, "--device", "cpu"]) == 2
    told = capsys.readouterr()
    assert message in told.err and "Traceback" not in told.err and not told.out
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(contents)


@pytest.mark.parametrize("sampling", [["--temperature", "0"], ["--seed", "7", "--repetition-penalty", "1.3"]])
@pytest.mark.parametrize("weights", [[], ["--int8"]])
def test_a_saved_text_goes_on_as_if_never_stopped(
    folder: Path, tmp_path: Path, sampling: list[str], weights: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def tokens(name: str, *words: str) -> list[int]:
        """Texts may be cut within a character, so tokens are compared."""
        _result(capsys, str(folder), *weights, *words, "--save", str(tmp_path / name))
        found: list[int] = load_file(tmp_path / name)["tokens"].tolist()
        return found

    whole = tokens("whole", "--prompt", "once", *sampling, "--max-new-tokens", "12")
    tokens("begun", "--prompt", "once", *sampling, "--max-new-tokens", "5")
    begun = ["--restore", str(tmp_path / "begun"), "--max-new-tokens", "7"]
    assert len(whole) == 16 and tokens("ended", *begun) == whole
    assert tokens("other", *begun, "--temperature", "5") != whole  # a flag wins over what was saved
    if "--seed" in sampling:
        assert tokens("same", *begun, "--seed", "7") == whole != tokens("seed", *begun, "--seed", "8")


def test_int8_is_another_model_to_a_saved_text(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = str(tmp_path / "row")
    _result(capsys, str(folder), "--int8", "--prompt", "once", "--max-new-tokens", "2", "--save", row)
    assert main(["generate", str(folder), "--restore", row, "--device", "cpu"]) == 2
    assert "was saved with another model" in capsys.readouterr().err


def test_a_conversation_gives_what_one_long_prompt_gives(folder: Path) -> None:
    """Greedy in fp32: what is read in turns is what is read at once."""
    loaded = load(folder)
    conversation = loaded.conversation(temperature=0, max_new_tokens=10)
    prompt = list(b"once")
    for text in ("once", " and then", "\nmore"):
        prompt = [*prompt, *(list(text.encode()) if conversation.has_begun else [])]
        conversation.turn.num_read = 0
        list(conversation.answer(text))
        new = loaded.generate(prompt, temperature=0, max_new_tokens=10)
        prompt += new
        assert conversation.turn.num_new == len(new)
        assert list(conversation._saved.tokens)[: len(prompt)] == prompt  # type: ignore[union-attr]
    assert conversation.turn.num_read == len("\nmore") + 1  # and the last token of the answer before


def test_a_text_can_be_read_and_answered_later(folder: Path, tmp_path: Path) -> None:
    loaded = load(folder)
    expected = loaded.generate(list(b"a long preface, and more"), temperature=0, max_new_tokens=10)
    for texts in (["a long preface", ", and more"], ["a long preface, and more"], list("a long preface, and more")):
        conversation = loaded.conversation(temperature=0, max_new_tokens=0)
        for text in texts:
            assert list(conversation.answer(text)) == []
        conversation.save(tmp_path / str(len(texts)))
        again = loaded.conversation(max_new_tokens=10)
        again.restore(tmp_path / str(len(texts)))
        list(again.answer())
        assert list(again._saved.tokens)[24:] == expected  # type: ignore[union-attr]


def test_an_answer_that_is_left_or_stopped_keeps_what_was_shown(folder: Path) -> None:
    loaded = load(folder)
    conversation = loaded.conversation(seed=3, max_new_tokens=30)
    next(conversation.answer("unused"))  # never finished: its row must not disturb the next
    conversation.reset()
    calls = iter(range(100))
    list(conversation.answer("once", lambda: next(calls) >= 10))
    assert conversation.turn.num_new == 10 and conversation.turn.finish_reason is None
    list(conversation.answer(None))
    assert conversation.turn.num_new == 30
    expected = loaded.generate(list(b"once"), seed=3, max_new_tokens=40, stop=[])
    assert list(conversation._saved.tokens) == [*b"once", *expected]  # type: ignore[union-attr]
    with pytest.raises(UserError, match="there is no text yet; give one to go on from"):
        loaded.conversation().answer(None)


def test_an_end_token_is_not_part_of_a_conversation(folder: Path) -> None:
    loaded = load(folder)
    conversation = loaded.conversation(seed=1, max_new_tokens=300)
    with torch.no_grad():
        loaded.model.backbone.embedding.weight[256] *= 30
    list(conversation.answer("a"))
    assert conversation.has_ended and conversation.turn.finish_reason == "stop"
    with pytest.raises(UserError, match="the text has ended; give one to go on from"):
        conversation.answer()
    before = list(conversation._saved.tokens)  # type: ignore[union-attr]
    assert before[-1] == 256
    list(conversation.answer(" more"))
    after = list(conversation._saved.tokens)  # type: ignore[union-attr]
    assert after[: len(before) + 4] == [*before[:-1], *b" more"]
    assert conversation.turn.num_read == 5


class _Terminal:
    """A command on a terminal of its own, and all that the terminal got."""

    def __init__(self, *words: str, cwd: Path) -> None:
        pty = pytest.importorskip("pty")  # not on Windows
        self.pid, self.ours = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            command = [sys.executable, "-m", "mambakit", "generate", *words]
            kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
            os.execve(sys.executable, command, {**kept, "TERM": "xterm"})
        self.seen = ""

    def until(self, pattern: str, seconds: float = 60) -> str:
        """Wait for a text in what is new; gives all of it up to there."""
        end = time.monotonic() + seconds
        content, new = b"", ""
        while not re.search(pattern, new):
            if time.monotonic() > end:
                raise TimeoutError(f"{pattern!r} did not come; there is {new!r}")
            if select.select([self.ours], [], [], 0.1)[0]:
                try:
                    block = os.read(self.ours, 65536)
                except OSError:
                    block = b""
                assert block, f"{pattern!r} did not come, and the command has ended; there is {new!r}"
                content += block
                new = content.decode(errors="replace")
        self.seen += new
        return new

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def interrupt(self, pattern: str) -> str:
        """Press Ctrl-C until the text comes. One press is enough for a program that waits; Python does not see one
        between the moment when it has printed a prompt and the moment when it begins to wait for a key."""
        for _ in range(30):
            self.type("\x03")
            with contextlib.suppress(TimeoutError):
                return self.until(pattern, seconds=2)
        raise TimeoutError(f"{pattern!r} did not come after 30 times Ctrl-C")

    def status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(folder: Path, tmp_path: Path) -> Iterator[Any]:
    opened: list[_Terminal] = []

    def open_one(*words: str, model: Path = folder) -> _Terminal:
        opened.append(_Terminal(str(model), "--device", "cpu", *words, cwd=tmp_path))
        opened[-1].until("> $")
        return opened[-1]

    yield open_one
    for each in opened:
        os.close(each.ours)  # which ends a command that still runs


DONE = r"tokens/s.*\n(\x1b\[\?2004[hl]|\r)*> $"


def test_turns_on_a_terminal(terminal: Any, folder: Path, tmp_path: Path) -> None:
    here = terminal("--temperature", "0", "--max-new-tokens", "12")
    here.type("once\n")
    first = here.until(DONE)
    assert re.search(r"\x1b\[2m12 tokens, [\d,.]+ tokens/s, 4 read in [\d.]+ s\x1b\[0m", first)
    here.type("/save here.row\n")
    here.until(r"Saved to here.row[^>]*> $")
    here.type(" and then\n")
    assert "10 read in" in here.until(DONE)  # nine bytes, and the last token of the answer
    here.type("/restore here.row\n")
    assert "temperature 0.0" in here.until(r"Restored from here.row[^>]*> $")
    here.type("/max-new-tokens 5\n")
    here.until(r"max new tokens 5[^>]*> $")
    here.type("\n")  # go on from there
    went_on = here.until(DONE)
    assert "\x1b[2m5 tokens" in went_on
    expected = load(folder).generate("once", temperature=0, max_new_tokens=17)
    last = expected[-3:].encode("ascii", "replace").decode()
    assert re.sub("[^ -~]", "?", last) in re.sub("[^ -~\n]", "?", went_on.replace("\r\n", "\n"))
    here.type("/reset\n")
    here.until(r"A new text[^>]*> $")
    here.type("\n/top-k x\n")
    assert "/top-k x: need a whole number" in here.until(r"need[^>]*> $")
    here.type("/temprature 1\n")
    here.until(r"did you mean /temperature\?[^>]*> $")
    here.type("/top-p 7\n")
    here.until(r"top_p=7.0: need[^>]*> $")
    here.type("/save\n")
    here.until(r"needs the name of a file[^>]*> $")
    here.type("/help\n")
    here.until(r"Ctrl-C ends an answer[^>]*> $")
    here.type("first \\\n")
    here.until(r"\.\.\. $")
    here.type("second\n")
    assert "13 read in" in here.until(DONE)
    here.type("/quit\n")
    assert here.status() == 0
    assert "Traceback" not in here.seen


def test_interrupts_end_an_answer_and_not_the_program(terminal: Any, folder: Path) -> None:
    here = terminal("--max-new-tokens", "100000000", model=folder.parent / "endless")
    here.type("once\n")
    here.until("once\r\n.*[^\r\n]")
    time.sleep(0.5)
    here.type("\x03")
    assert re.search(r"[\d]+ tokens, [\d,.]+ tokens/s, 4 read in [\d.]+ s, stopped", here.until(DONE))
    here.interrupt(r"Ctrl-D or /quit ends[^>]*> $")  # at the prompt
    here.type("/max-new-tokens 3\n")
    here.until(r"max new tokens 3[^>]*> $")
    here.type("\n")
    assert "3 tokens" in here.until(DONE)
    here.type("\x04")
    assert here.status() == 0


def test_a_conversation_needs_a_terminal_on_both_sides(folder: Path) -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mambakit", "generate", str(folder)]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=120)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 2 and "there is no text to go on from; give it with --prompt" in done.stderr
