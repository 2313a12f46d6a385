"""The server as its clients see it: OpenAI's own client, plain HTTP, and sockets that misbehave."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from runs import wait_for

import mambakit
from mambakit.cli import main
from mambakit.decoding import read_row

from .servers import LONG, Running, make_model, make_run, serving

KEY = "sesame"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(folder, read_timeout=3.0, max_prompt_tokens=500, max_body_kb=64) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_completion_is_what_generate_gives(client: openai.OpenAI, folder: Path) -> None:
    expected = mambakit.load(folder).generate("The cat", temperature=0, max_new_tokens=30)
    answer = client.completions.create(model="small", prompt="The cat", temperature=0, max_tokens=30)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 30, 37)


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI, server: Running) -> None:
    whole = server.text(prompt="The cat", temperature=0, max_tokens=2000)
    chunks = list(
        client.completions.create(
            model="small", prompt="The cat", temperature=0, max_tokens=2000, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2000
    with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert list(answer.iter_lines())[-2:] == ["data: [DONE]", ""]


def test_pieces_come_while_the_rest_is_chosen(client: openai.OpenAI, server: Running) -> None:
    whole = server.text(prompt="The cat", temperature=0, max_tokens=2000)
    with client.completions.create(
        model="small", prompt="The cat", temperature=0, max_tokens=LONG, stream=True
    ) as stream:
        text = "".join(chunk.choices[0].text for chunk in itertools.islice(stream, 5))
        assert server.num_running() == 1
    assert text and (whole.startswith(text) or text.startswith(whole))
    wait_for(lambda: server.num_running() == 0, 10)


def test_a_chat_follows_the_models_template(client: openai.OpenAI, server: Running) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    answer = client.chat.completions.create(model="small", messages=messages, temperature=0, max_tokens=20)
    text = answer.choices[0].message.content
    assert text == server.text(prompt="system: Be brief.\nuser: Hi\nassistant:", temperature=0, max_tokens=20)
    stream = client.chat.completions.create(model="small", messages=messages, temperature=0, max_tokens=20, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == text


def test_a_client_that_goes_away_frees_its_place(client: openai.OpenAI, server: Running) -> None:
    before = server.metric("cancelled_sequences_total")
    stream = client.completions.create(model="small", prompt="x", max_tokens=LONG, stream=True, temperature=0)
    next(iter(stream))
    assert server.num_running() == 1
    stream.close()
    wait_for(lambda: server.num_running() == 0, 10)
    with server.socket() as connection:  # one that waits for the whole answer
        body = b'{"prompt": "x", "temperature": 0, "max_tokens": %d}' % LONG
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_for(lambda: server.num_running() == 1, 10)
    wait_for(lambda: server.num_running() == 0, 10)
    assert server.metric("cancelled_sequences_total") == before + 2


def test_logprobs_are_of_the_chosen_tokens(client: openai.OpenAI, server: Running) -> None:
    answer = client.completions.create(model="small", prompt="abc", temperature=0, max_tokens=9, logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs and found.top_logprobs and found.tokens and found.text_offset
    assert len(found.tokens) == len(found.text_offset) == 9
    for token, logprob, likeliest in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(likeliest) == 3 and max(likeliest.values()) == likeliest[token] == logprob
    chat = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "x"}], max_tokens=5, logprobs=True, top_logprobs=2, seed=1
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content and len(content) == 5 and all(len(entry.top_logprobs) == 2 for entry in content)
    streamed = client.completions.create(
        model="small", prompt="abc", temperature=0, max_tokens=9, logprobs=0, stream=True
    )
    pieces = [chunk.choices[0].logprobs for chunk in streamed]
    assert [value for piece in pieces if piece for value in piece.token_logprobs or []] == found.token_logprobs


def test_seeds_repeat_and_answers_of_one_request_differ(server: Running) -> None:
    def texts(**options: Any) -> list[str]:
        answer = server.complete(prompt=["one", "two"], max_tokens=12, **options).json()
        assert [choice["index"] for choice in answer["choices"]] == [*range(len(answer["choices"]))]
        return [choice["text"] for choice in answer["choices"]]

    found = texts(n=3, seed=5)
    assert len(set(found)) == 6
    assert texts(n=3, seed=5) == found
    assert texts(n=3, seed=6) != found
    assert server.text(prompt="one", max_tokens=12, seed=5) == found[0]


def test_an_answer_ends_before_a_stop_text(server: Running) -> None:
    whole = server.text(prompt="q", temperature=0, max_tokens=40)
    stop, before = whole[20:22], server.metric("cancelled_sequences_total")
    answer = server.complete(prompt="q", temperature=0, max_tokens=40, stop=[stop, "never in there"]).json()["choices"][
        0
    ]
    assert answer["text"] == whole[: whole.index(stop)]
    assert answer["finish_reason"] == "stop"
    wait_for(lambda: server.num_running() == 0, 10)
    assert server.metric("cancelled_sequences_total") == before


def test_prompts_may_be_tokens(server: Running) -> None:
    expected = server.text(prompt="hello", temperature=0, max_tokens=8)
    tokens = [*b"hello"]
    assert server.text(prompt=tokens, temperature=0, max_tokens=8) == expected
    several = server.complete(prompt=[tokens, [*b"other"]], temperature=0, max_tokens=8).json()["choices"]
    assert several[0]["text"] == expected != several[1]["text"]


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        (
            {"prompt": "a", "temprature": 1},
            400,
            "temprature",
            "unknown parameter 'temprature'; did you mean 'temperature'?",
        ),
        ({"prompt": "a", "max_tokens": "8"}, 400, "max_tokens", "max_tokens='8': need a valid integer"),
        ({"prompt": "a", "max_tokens": LONG + 1}, 400, "max_tokens", "--max-new-tokens"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ({"prompt": 5}, 400, "prompt", "prompt=5: need a text, up to 32 texts"),
        ({"prompt": [257]}, 400, "prompt", "the token 257, outside the vocabulary 0…256"),
        ({"prompt": "a" * 501}, 400, "prompt", "501 tokens; need at most 500 (--max-prompt-tokens of the server)"),
        ({"prompt": "a", "echo": True}, 400, "echo", "echo=True: need false"),
        ({"prompt": "a", "stop": ""}, 400, "stop", "stop=''"),
        ({}, 400, "prompt", "the parameter 'prompt' is missing"),
        ({"prompt": "a", "model": "large"}, 404, "model", "there is no model 'large' here; the models are small"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_request_is_said(
    server: Running, body: dict[str, Any], status: int, param: str, message: str
) -> None:
    answer = server.complete(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert message in error["message"]


def test_bodies_that_are_no_request(server: Running) -> None:
    for content in (
        b"{bad",
        b"[]",
        b"",
        b"[" * 30_000,
        b"\xff\xfe",
        b'{"prompt": %s}' % (b"9" * 5000),
        b'{"prompt": "a", "temperature": NaN}',
    ):
        answer = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, content[:20]
        assert answer.json()["error"]["message"]
    assert server.http.post("/v1/completions", content=b"{}").status_code == 400  # no content type
    assert server.http.get("/v1/completions").json()["error"]["type"] == "invalid_request_error"
    assert server.http.get("/nothing").status_code == 404


def test_a_body_that_is_too_large_is_not_read(server: Running) -> None:
    assert server.complete(prompt="a" * 70_000).status_code == 413

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1024

    assert server.http.post("/v1/completions", content=endless()).status_code == 413  # without its length


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n{"], ids=str)  # fmt: skip
def test_a_request_that_comes_too_slowly_is_ended(server: Running, sent: bytes) -> None:
    began = time.monotonic()
    with server.socket() as connection:
        connection.sendall(sent)
        answer = b""
        while block := connection.recv(4096):
            answer += block
    assert answer.startswith(b"HTTP/1.1 408") and b"--read-timeout" in answer
    assert 1.5 < time.monotonic() - began < 10


def test_a_connections_second_request_must_come_in_time_too(server: Running) -> None:
    with server.socket() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /hea")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_sixteen_clients_get_what_each_would_get_alone(server: Running) -> None:
    prompts = [f"{'some words ' * (number % 5)}number {number}" for number in range(16)]

    def ask(prompt: str) -> str:
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as own:
            return own.completions.create(model="small", prompt=prompt, temperature=0, max_tokens=60).choices[0].text

    alone = [server.text(prompt=prompt, temperature=0, max_tokens=60) for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_a_prompt_that_goes_on_from_a_known_text_reads_only_the_rest(server: Running, folder: Path) -> None:
    def ask(of: Running, prompt: str) -> tuple[str, int]:
        answer = of.complete(prompt=prompt, temperature=0, max_tokens=20).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    first = [*b"a first turn that nobody has asked about before: "]
    answer = server.complete(prompt=first, temperature=0, max_tokens=20, logprobs=0).json()["choices"][0]
    generated = mambakit.load(folder).generate(first, temperature=0, max_new_tokens=20)
    longer = [*first, *generated, *b" and the next one"]
    assert isinstance(answer["text"], str)
    hits = server.metric("prefix_cache_hits_total")
    cached = server.complete(prompt=longer, temperature=0, max_tokens=20).json()
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] == len(first) + 19  # all but the last new token
    assert server.metric("prefix_cache_hits_total") == hits + 1
    again, num_cached = ask(server, "the same twice")
    assert num_cached == 0
    assert ask(server, "the same twice") == (again, len("the same twice"))
    with serving(folder, prefix_cache_mb=0) as fresh:
        assert fresh.complete(prompt=longer, temperature=0, max_tokens=20).json()["choices"] == cached["choices"]
        assert ask(fresh, "the same twice") == ask(fresh, "the same twice") == (again, 0)


def test_a_long_prompt_does_not_hold_up_the_others(folder: Path) -> None:
    with serving(folder, max_prompt_tokens=60_000) as server, ThreadPoolExecutor(2) as pool:
        long = "a long text " * 4000
        stream = server.http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": LONG, "stream": True, "temperature": 0}
        )
        with stream as running:
            lines = running.iter_lines()
            next(lines)
            before = server.metric("generated_tokens_total")
            waiting = pool.submit(server.text, prompt=long, temperature=0, max_tokens=3)
            answer = waiting.result()
            assert server.metric("generated_tokens_total") - before > 40  # one after each piece that is read
        assert answer == mambakit.load(folder).generate(long, temperature=0, max_new_tokens=3)


def test_who_finds_the_queue_full_is_told_to_come_again(folder: Path) -> None:
    with serving(folder, max_concurrent=1, max_queue=1, timeout=6.0) as server, ThreadPoolExecutor(2) as pool:
        long = [pool.submit(server.complete, prompt="x", max_tokens=LONG, temperature=0)]
        wait_for(lambda: server.num_running() == 1, 10)
        long.append(pool.submit(server.complete, prompt="x", max_tokens=LONG, temperature=0))
        wait_for(lambda: server.service.engine.num_waiting == 1, 10)
        refused = server.complete(prompt="x")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full" and int(refused.headers["retry-after"]) > 0
        first, second = (each.result() for each in long)
        assert first.json()["choices"][0]["finish_reason"] == "length"  # at the end of its time
        assert 0 < first.json()["usage"]["completion_tokens"] < LONG
        assert second.status_code in (200, 503)
        assert server.text(prompt="x", max_tokens=2, temperature=0)


def test_a_key_is_asked_for(folder: Path) -> None:
    with serving(folder, api_key=KEY) as server:
        assert server.http.get("/health").status_code == server.http.get("/").status_code == 200
        for headers in {}, {"authorization": "Bearer wrong"}, {"authorization": KEY}:
            answer = server.http.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY) as own:
            assert [model.id for model in own.models.list()] == ["small"]
            assert own.models.retrieve("small").id == "small"


def test_a_page_of_another_site_is_refused(server: Running) -> None:
    for host, status in ("evil.example", 403), ("localhost:99", 200), ("[::1]:99", 200), ("127.0.0.1", 200):
        assert server.http.get("/v1/models", headers={"host": host}).status_code == status


def test_a_chat_with_a_model_that_has_no_template_is_refused(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "plain", template=None)) as server:
        answer = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert answer.status_code == 400 and "has no chat template" in answer.json()["error"]["message"]
    strict = "{{ raise_exception('system messages are not known') if messages[0].role == 'system' }}"
    with serving(make_model(tmp_path / "strict", template=strict)) as server:
        answer = server.http.post("/v1/chat/completions", json={"messages": [{"role": "system", "content": "x"}]})
        assert answer.status_code == 400 and "system messages are not known" in answer.json()["error"]["message"]


def test_every_checkpoint_of_a_run_can_be_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "story", 4, broken=2)
    steps = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    weights = run / "checkpoints" / steps[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"oops")
    with serving(run, max_models=1, max_concurrent=2) as server:
        listed = server.http.get("/v1/models").json()["data"]
        assert [entry["id"] for entry in listed] == ["story", *(f"story/{step}" for step in reversed(steps))]
        assert [entry["id"] for entry in listed if entry["loaded"]] == ["story"]
        for step in steps[2:]:
            expected = mambakit.load(run / "checkpoints" / step).generate("the cat", temperature=0, max_new_tokens=10)
            assert server.text(model=f"story/{step}", prompt="the cat", temperature=0, max_tokens=10) == expected
        damaged = server.complete(model=f"story/{steps[0]}", prompt="x")
        assert damaged.status_code == 500 and "is damaged" in damaged.json()["error"]["message"]
        broken = server.complete(model=f"story/{steps[1]}", prompt="x", n=3)
        assert broken.status_code == 500 and "weights of this model are not finite" in broken.json()["error"]["message"]
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": LONG, "stream": True, "temperature": 0}
        ) as busy:
            lines = busy.iter_lines()  # which ends the stream when it is dropped
            next(lines)
            answer = server.complete(model=f"story/{steps[-1]}", prompt="x")
            assert answer.status_code == 503 and "--max-models" in answer.json()["error"]["message"]


def test_a_signal_finishes_what_is_running(folder: Path) -> None:
    command = [sys.executable, "-m", "mambakit", "serve", str(folder), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        address = line.split(" at ")[1].split()[0]
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as own:
            stream = own.completions.create(model="small", prompt="x", temperature=0, max_tokens=1500, stream=True)
            pieces = [next(iter(stream)).choices[0]]
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            pieces += [chunk.choices[0] for chunk in stream]
        assert pieces[-1].finish_reason == "length"
        assert "".join(piece.text for piece in pieces) == mambakit.load(folder).generate(
            "x", temperature=0, max_new_tokens=1500
        )
        assert process.wait(20) == 0
        assert "SIGTERM: finishing what is running" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_mistakes_of_the_command_are_told(
    folder: Path, server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in [
        ([str(folder), "--port", str(server.port)], f"--port {server.port} cannot be listened at"),
        ([str(tmp_path)], "holds no model"),
        ([str(folder), "--max-concurrent", "0"], "--max-concurrent 0: need at least 1"),
        ([str(folder), "--grace", "nan"], "--grace nan: need a number of seconds"),
        ([str(folder), "--api-key", ""], "--api-key"),
    ]:
        assert main(["serve", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_state_is_saved_and_gone_on_from(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 10}
    with serving(folder, states=tmp_path / "states") as server:
        first = server.text(prompt="Once", save_state="turn-1", **options)
        whole = server.text(prompt="Once", temperature=0, max_tokens=25)
        assert server.text(prompt="", restore_state="turn-1", temperature=0, max_tokens=15) == whole[len(first) :]
        tokens = [*b"Once", *mambakit.load(folder).generate([*b"Once"], temperature=0, max_new_tokens=10)]
        saved = read_row(tmp_path / "states/turn-1.row", mambakit.load(folder).model)  # as mambakit generate reads it
        assert saved.tokens == tokens
        later = server.complete(prompt=" more", restore_state="turn-1", save_state="turn-2", **options).json()
        expected = server.complete(prompt=[*tokens, *b" more"], **options).json()
        assert later["choices"] == expected["choices"]
        assert later["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        stopped = server.text(prompt="Once", save_state="stopped", stop=whole[3:5], temperature=0, max_tokens=99)
        assert stopped == whole[: whole.index(whole[3:5])]
        after = whole[whole.index(whole[3:5]) + 2 :]
        assert after.startswith(server.text(prompt="", restore_state="stopped", temperature=0, max_tokens=4))
        for body, status, message in [
            ({"save_state": "turn-1"}, 409, "there is a state 'turn-1' already"),
            ({"restore_state": "never"}, 404, "there is no state 'never' here"),
            ({"restore_state": "../turn-1"}, 400, "restore_state"),
        ]:
            answer = server.complete(prompt="x", **body)
            assert answer.status_code == status and message in answer.json()["error"]["message"]
    other = make_model(tmp_path / "other", seed=1)
    with serving(other, states=tmp_path / "states") as server:
        answer = server.complete(prompt="x", restore_state="turn-1")
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("the state 'turn-1' was saved with another model")
    with serving(folder) as server:
        answer = server.complete(prompt="x", save_state="a")
        assert answer.status_code == 400 and "--states" in answer.json()["error"]["message"]


@pytest.mark.parametrize("settings", [{}, {"api_key": KEY, "states": True}], ids=str)
def test_the_servers_own_description_of_itself_is_true(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """schemathesis sends requests that the schema allows, and ones that it does not, and looks at the answers."""
    if settings:
        settings = {**settings, "states": tmp_path / "states"}
    with serving(folder, **{"max_new_tokens": 16, **settings}) as server:
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.address}/openapi.json"]
        command += ["--max-examples", "15", "--seed", "1", "--header", f"Authorization: Bearer {KEY}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]
