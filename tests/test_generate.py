"""Tokens and text from models: settings do what they say, rows do not touch each other, pieces make up the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mambakit import MambaLM
from mambakit.checkpoint import CheckpointError
from mambakit.data.tokenize import bytes_tokenizer, vocab_size
from mambakit.decoding import Choice, Decoder, Sampling, generate_batch, generate_text, generate_tokens
from mambakit.decoding.decoder import READ_AT_ONCE
from mambakit.decoding.stepping import Stepper
from mambakit.files import UserError
from mambakit.loaded import LoadedModel

SENTENCE = "Drei naïve Mäuse 🐭🐁 mögen Käse 🧀; très bien, said the cat."
END = 0  # "<|endoftext|>"
GREEDY = Choice(Sampling(temperature=0))


@pytest.fixture
def model() -> MambaLM:
    return small_model("mamba2", vocab_size=45, vocab_multiple=16).eval()


def _generate(model: MambaLM, prompt: list[int] | None = None, **options: Any) -> list[int]:
    return list(generate_tokens(model, prompt or [1, 2, 3], **{"max_new_tokens": 40, **options}))


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_greedy_is_the_argmax_of_the_whole_text(kind: str) -> None:
    model = small_model(kind).eval()
    text = [1, 2, 3]
    for token in generate_tokens(model, text.copy(), max_new_tokens=15, temperature=0):
        assert token == int(model(torch.tensor([text])).logits[0, -1].argmax())
        text.append(token)


def test_a_long_prompt_is_read_in_pieces() -> None:
    model = small_model("mamba1").eval()
    prompt = torch.randint(0, 50, (READ_AT_ONCE["cpu"] + 5,))
    (token,) = generate_tokens(model, prompt.tolist(), max_new_tokens=1, temperature=0)
    assert token == int(model(prompt[None]).logits[0, -1].argmax())


def test_a_seed_repeats_itself(model: MambaLM) -> None:
    assert _generate(model, seed=1) == _generate(model, seed=1)
    assert _generate(model, seed=1) != _generate(model, seed=2)


def test_padding_of_the_vocabulary_is_never_chosen(model: MambaLM) -> None:
    with torch.no_grad():
        model.backbone.embedding.weight[45:] *= 50
    assert max(_generate(model, max_new_tokens=300, temperature=5.0)) < 45


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_the_narrowest_choice_is_greedy(model: MambaLM, narrow: dict[str, Any]) -> None:
    assert _generate(model, **narrow) == _generate(model, temperature=0)


def test_repetition_penalty_makes_repeats_rarer(model: MambaLM) -> None:
    counts = [len(set(_generate(model, temperature=0, repetition_penalty=penalty))) for penalty in (1.0, 100.0)]
    assert counts[1] > counts[0]
    assert counts[1] == 40  # none twice, of 45


def test_stops_before_a_stop_token(model: MambaLM) -> None:
    free = _generate(model, temperature=0)
    assert _generate(model, temperature=0, stop=[free[2]]) == free[: free.index(free[2])]


def test_the_callers_own_code_keeps_its_grad_mode(model: MambaLM) -> None:
    """A training step, or a second generator, between two tokens of an open one."""
    first, second = generate_tokens(model, [1], seed=1), generate_tokens(model, [1], seed=1)
    for _ in range(3):
        assert next(first) == next(second)
        assert not torch.is_inference_mode_enabled()
        model(torch.zeros(1, 3, dtype=torch.long), targets=torch.zeros(1, 3, dtype=torch.long)).loss_sum.backward()


def test_the_lowest_temperature_is_greedy(model: MambaLM) -> None:
    assert _generate(model, temperature=1e-40) == _generate(model, temperature=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [45, 48]}, "tokens holds 48, outside the vocabulary 0…47"),
        ({"prompt": [-1]}, "tokens holds -1"),
        ({"prompt": []}, "the prompt is empty"),
        ({"temperature": -1}, "temperature=-1: need a number of at least 0"),
        ({"top_k": 0, "top_p": 2}, "top_k=0: need at least 1; top_p=2: need a number above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ],
)
def test_bad_options_are_named(model: MambaLM, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prompt": [1], **options}
    with pytest.raises(ValueError, match=message):
        generate_tokens(model, **arguments)


def _by_row(pairs: Iterable[tuple[int, Any]], num_rows: int) -> list[list[Any]]:
    rows: list[list[Any]] = [[] for _ in range(num_rows)]
    for row, value in pairs:
        rows[row].append(value)
    return rows


def _batch(model: MambaLM, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return _by_row(generate_batch(model, prompts, **{"max_new_tokens": 40, **options}), len(prompts))


@pytest.fixture
def step_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each decoding step served."""
    sizes: list[int] = []
    step = Stepper.step

    def counted(self: Stepper, rows: int, *arguments: Any) -> Any:
        sizes.append(rows)
        return step(self, rows, *arguments)

    monkeypatch.setattr(Stepper, "step", counted)
    return sizes


PROMPTS = [[1, 2, 3], [7], [4, 4, 9, 30, 31, 5, 17, 2, 2, 11], [8, 1]]


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_each_row_of_a_batch_is_as_if_alone(kind: str, penalty: float) -> None:
    model = small_model(kind).eval()
    options: dict[str, Any] = {"temperature": 0, "repetition_penalty": penalty}
    rows = _batch(model, PROMPTS, **options)
    assert rows == [_generate(model, prompt, **options) for prompt in PROMPTS]
    assert len({tuple(row) for row in rows}) == len(PROMPTS)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_what_a_row_draws_does_not_depend_on_the_others(kind: str) -> None:
    model = small_model(kind).eval()
    rows = _batch(model, PROMPTS, seed=5)
    assert rows[0] == _generate(model, PROMPTS[0], seed=5)
    assert _batch(model, [[9, 9], PROMPTS[1], [20]], seed=5)[1] == rows[1]
    assert _batch(model, PROMPTS, seed=5) == rows
    assert all(mine != other for mine, other in zip(_batch(model, PROMPTS, seed=6), rows, strict=True))


def test_every_row_and_seed_draws_its_own_numbers(model: MambaLM) -> None:
    rows = [tuple(row) for seed in (0, 1, 2) for row in _batch(model, [[1, 2]] * 3, seed=seed)]
    assert len(set(rows)) == 9
    assert len({tuple(row) for row in _batch(model, [[1, 2]] * 3)}) == 3


def test_a_row_that_ends_leaves_the_others_as_they_are(model: MambaLM, step_sizes: list[int]) -> None:
    options: dict[str, Any] = {"seed": 1, "max_new_tokens": 20, "repetition_penalty": 3.0}  # what was seen goes along
    free = _batch(model, PROMPTS, **options)
    once = [(row.index(token), token) for row in free for token in row if sum(token in other for other in free) == 1]
    place, stop = min(pair for pair in once if pair[0] > 0)  # in one row alone
    step_sizes.clear()
    rows = _batch(model, PROMPTS, **options, stop=[stop])
    assert rows == [row[:place] if stop in row else row for row in free]
    assert step_sizes == [4] * place + [3] * (19 - place)


def test_a_decoder_takes_rows_in_and_lets_them_go(model: MambaLM, step_sizes: list[int]) -> None:
    """Rows that come later, and others that end, change nothing for a row."""
    alone = _batch(model, PROMPTS, temperature=0, max_new_tokens=8)
    decoder = Decoder(model)
    found: dict[int, list[int]] = {row: [] for row in range(len(PROMPTS))}
    step_sizes.clear()

    def add(*rows: int) -> None:
        memories = decoder.read([PROMPTS[row] for row in rows])
        decoder.add({row: (memory, GREEDY) for row, memory in zip(rows, memories, strict=True)})

    def steps(count: int) -> None:
        for _ in range(count):
            for row, token in decoder.step().items():
                found[row].append(token.token)

    add(2, 0)
    steps(2)
    add(1)
    steps(3)
    decoder.drop([0])
    add(3)
    steps(3)
    decoder.drop([2, 1, 3])
    assert decoder.rows == [] and decoder.step() == {} and step_sizes == [2, 3, 3, 3, 3]
    assert found == {row: alone[row][:length] for row, length in {0: 4, 1: 5, 2: 6, 3: 3}.items()}


def test_a_batch_names_the_prompts_that_are_empty(model: MambaLM) -> None:
    with pytest.raises(ValueError, match="^prompt 1 is empty; give at least one token; prompt 3 is empty"):
        generate_batch(model, [[1], [], [2], []])
    with pytest.raises(ValueError, match="there are no prompts; give at least one"):
        generate_batch(model, [])


def _byte_level() -> Tokenizer:
    """Few merges: a character outside ASCII is mostly several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCE, "Ça va? Tschüß, naïve cat 🐈 of the Käse."], trainer)
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As SentencePiece has it: words with their space, and single bytes; one bad byte spoils all that stand with it."""
    words = ["</s>", "\u2581", "\u2581cat", "\u2581Käse", *"abc", *(f"<0x{byte}>" for byte in ("0A", "61", "C3", "A9"))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.mark.parametrize("make", [_byte_level, _byte_fallback])
def test_pieces_are_what_decoding_all_tokens_adds_to_the_prompt(make: Callable[[], Tokenizer]) -> None:
    """Random tokens: bytes that are no UTF-8, special tokens between them, spaces at the start."""
    tokenizer = make()
    model = small_model("mamba1", vocab_size=tokenizer.get_vocab_size() + 3).eval()  # three ids without text
    prompts = ["a", "bc", "é", "\n"] * 10
    options: dict[str, Any] = {"seed": 4, "temperature": 3.0, "max_new_tokens": 50}
    prompt_tokens = [tokenizer.encode(prompt).ids for prompt in prompts]
    whole = [
        tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]
        for prompt, new in zip(prompt_tokens, _batch(model, prompt_tokens, **options), strict=True)
    ]
    pieces = _by_row(generate_text(model, tokenizer, prompts, **options), len(prompts))
    assert ["".join(row) for row in pieces] == whole
    assert min(len(row) for row in pieces) > 5
    assert any(text.startswith(" ") for text in whole) and any("\ufffd" in text for text in whole)
    assert any(text.endswith("\ufffd") for text in whole)  # held to the last


@pytest.fixture(scope="module")
def reciter() -> LoadedModel:
    """A model that has learned one sentence by heart."""
    torch.manual_seed(0)
    tokenizer = _byte_level()
    model = small_model("mamba2", d_model=48, vocab_size=tokenizer.get_vocab_size())
    text = torch.tensor([[END, *tokenizer.encode(SENTENCE).ids, END]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        model(text[:, :-1], targets=text[:, 1:]).loss_sum.backward()
        optimizer.step()
    return LoadedModel(model.eval(), tokenizer, (END,))


def _recite(loaded: LoadedModel, *prompts: str, **options: Any) -> list[list[str]]:
    """The pieces of each row."""
    options = {"end_tokens": loaded.end_tokens, "temperature": 0, **options}
    return _by_row(generate_text(loaded.model, loaded.tokenizer, prompts, **options), len(prompts))


def test_characters_of_several_tokens_come_whole(reciter: LoadedModel) -> None:
    tokens = [reciter.tokenizer.decode([token]) for token in reciter.tokenizer.encode(SENTENCE).ids]
    assert sum("\ufffd" in token for token in tokens) > 10
    (pieces,) = _recite(reciter, "")
    assert "".join(pieces) == SENTENCE
    assert [piece for piece in pieces if piece in tokens] == [token for token in tokens if "\ufffd" not in token]
    assert [piece for piece in pieces if piece not in tokens] == [" 🐭", "🐁", "ö", " 🧀", "è"]


def test_pieces_of_a_prompt_remember_each_other(reciter: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both prompts end in the token "en": what comes next hangs on what was read before."""
    monkeypatch.setitem(READ_AT_ONCE, "cpu", 1)
    begins = ["Drei naïve Mäuse 🐭🐁 mögen", "Drei naïve Mäuse 🐭🐁 mögen Käse 🧀; très bien"]
    texts = reciter.generate([f"<|endoftext|>{begin}" for begin in begins], temperature=0)
    assert texts == [SENTENCE.removeprefix(begin) for begin in begins]


def test_prompts_of_different_lengths_go_on_together(reciter: LoadedModel, step_sizes: list[int]) -> None:
    begins = ["Drei naïve Mäuse 🐭🐁 mögen Käse 🧀; très bien, said", "", "Drei", "Drei naïve Mäuse 🐭"]
    rows = _recite(reciter, *(f"<|endoftext|>{begin}" for begin in begins))
    assert ["".join(row) for row in rows] == [SENTENCE.removeprefix(begin) for begin in begins]
    assert (step_sizes[0], step_sizes[-1]) == (4, 1)


@pytest.mark.parametrize(
    ("stop_strings", "expected"),
    [
        (["D"], ""),  # at the very start
        (["Drei na"], ""),  # over three tokens and into a fourth
        (["🐁 mö"], "Drei naïve Mäuse 🐭"),  # begins and ends between the bytes of others
        (["cat."], "Drei naïve Mäuse 🐭🐁 mögen Käse 🧀; très bien, said the "),  # at the very end
        (["naïve cat", "Mäuse 🧀", "Käse"], "Drei naïve Mäuse 🐭🐁 mögen "),  # two begin and do not go on
        (["naïve", "aï"], "Drei n"),  # the first that is complete, also when both come in one token
        ([" naï", "aï"], "Drei"),  # complete at once: the longer
        (["Mäuse 🐭🐁 mag", "🐁"], "Drei naïve Mäuse 🐭"),  # inside what might have become another
        (["said the", "d cat"], "Drei naïve Mäuse 🐭🐁 mögen Käse 🧀; très bien, "),  # both begin: the longer is held
        (["zebra", "cat.\n"], SENTENCE),  # what begins at the end is text after all
    ],
    ids=str,
)
def test_text_ends_before_a_stop_string(
    reciter: LoadedModel, step_sizes: list[int], stop_strings: list[str], expected: str
) -> None:
    (pieces,) = _recite(reciter, "", stop_strings=stop_strings)
    assert "".join(pieces) == expected
    tokens = reciter.tokenizer.encode(SENTENCE).ids
    texts = [reciter.tokenizer.decode(tokens[: n + 1]) for n in range(len(tokens))]
    complete = (n for n, text in enumerate(texts) if any(stop in text for stop in stop_strings))
    assert len(step_sizes) == next(complete, len(tokens))  # what comes after is not computed


def test_a_stop_string_ends_its_own_row_alone(reciter: LoadedModel, step_sizes: list[int]) -> None:
    first, second = _recite(reciter, "", "<|endoftext|>Drei naïve Mäuse 🐭", stop_strings=["Mäuse"])
    assert ("".join(first), "".join(second)) == ("Drei naïve ", "🐁 mögen Käse 🧀; très bien, said the cat.")
    assert 0 < step_sizes.count(2) < step_sizes.count(1)


def test_text_comes_as_soon_as_it_is_certain(reciter: LoadedModel, step_sizes: list[int]) -> None:
    options: dict[str, Any] = {"temperature": 0, "stop_strings": ["e cat"]}
    pieces = [(piece, len(step_sizes)) for piece in reciter.stream("", **options)]
    assert pieces[:4] == [("Dr", 0), ("ei", 2), (" naïv", 3), ("e Mä", 5)]


def test_a_held_tail_comes_when_its_row_ends(reciter: LoadedModel) -> None:
    """A row that ends early does not wait for the others."""
    prompts = ["<|endoftext|>Drei naïve Mäuse 🐭🐁 mögen Käse 🧀; très bien, said the", "<|endoftext|>Drei"]
    options: dict[str, Any] = {"end_tokens": (END,), "stop_strings": ["cat.\n"], "temperature": 0}
    pieces = list(generate_text(reciter.model, reciter.tokenizer, prompts, **options))
    assert pieces[:4] == [(0, " "), (1, " naïve"), (1, " "), (0, "cat.")]
    assert "".join(piece for row, piece in pieces if row == 1) == SENTENCE[4:]


def test_special_tokens_are_not_shown(reciter: LoadedModel) -> None:
    text = reciter.generate("", temperature=0, stop=(), max_new_tokens=100)  # past the end token
    assert text.startswith(SENTENCE) and len(text) > len(SENTENCE)
    assert "endoftext" not in text


def test_a_loaded_model_gives_text_for_text(reciter: LoadedModel) -> None:
    begin = "<|endoftext|>Drei"
    assert reciter.generate("", temperature=0) == SENTENCE
    assert reciter.generate([begin, ""], temperature=0) == [SENTENCE[4:], SENTENCE]
    assert reciter.generate([begin, ""], temperature=0, stop_strings=["M"]) == [" naïve ", "Drei naïve "]
    assert reciter.generate([END], temperature=0) == reciter.tokenizer.encode(SENTENCE).ids
    assert "".join(reciter.stream(begin, temperature=0)) == SENTENCE[4:]


def test_a_seed_repeats_a_text(reciter: LoadedModel) -> None:
    options: dict[str, Any] = {"temperature": 3.0, "max_new_tokens": 30}
    texts = reciter.generate(["ab", "ab"], seed=1, **options)
    assert texts == reciter.generate(["ab", "ab"], seed=1, **options)
    assert texts[0] == reciter.generate("ab", seed=1, **options) == "".join(reciter.stream("ab", seed=1, **options))
    assert len({*texts, *reciter.generate(["ab", "ab"], seed=2, **options)}) == 4


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("a", {"stop_strings": "\n"}, r"stop_strings='\\n' is one string; need several: give \['\\n'\]"),
        ("a", {"stop_strings": ["b", ""]}, r"stop_strings=\['b', ''\] holds an empty string"),
        ("a", {"temperature": -1}, "temperature=-1: need a number of at least 0"),
        ([1, 2], {"stop_strings": ["b"]}, "stop_strings end a text, but the prompt is token ids"),
        (["a", 2], {}, r"the prompt \['a', 2\] mixes texts and token ids"),
        ([], {}, "the prompt is empty; give at least one token"),
    ],
)
def test_bad_text_options_are_named(reciter: LoadedModel, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reciter.generate(prompt, **options)


def test_text_needs_a_start(reciter: LoadedModel) -> None:
    with pytest.raises(ValueError, match="the prompt '' has no token to start from; give text"):
        generate_text(reciter.model, reciter.tokenizer, ["a", ""])
    with pytest.raises(ValueError, match="the prompt '日' has no token"):
        generate_text(reciter.model, _byte_fallback(), ["日"], end_tokens=(END,))
    with pytest.raises(ValueError, match=r"prompts='ab' is one string; need several: give \['ab'\]"):
        generate_text(reciter.model, reciter.tokenizer, "ab")
    with pytest.raises(CheckpointError, match="no tokenizer.json; put it into its folder"):
        LoadedModel(reciter.model, None).stream("a")


def test_a_space_at_the_end_of_a_prompt_is_part_of_the_next_word(reciter: LoadedModel) -> None:
    at = SENTENCE.index("said")
    assert reciter.tokenizer is not None
    assert reciter.tokenizer.encode("bien, said").ids[-1] != reciter.tokenizer.encode("bien, ").ids[-1]
    expected = reciter.generate(SENTENCE[: at - 1], temperature=0)
    assert expected.startswith(" said")
    for options in ({}, {"stop_strings": ["cat"]}):
        whole = reciter.generate(SENTENCE[: at - 1], temperature=0, **options)
        assert reciter.generate(SENTENCE[:at], temperature=0, **options) == whole[1:]
    assert reciter.generate([SENTENCE[:at], SENTENCE[: at - 1]], temperature=0) == [expected[1:], expected]


@pytest.mark.parametrize("where", ["backbone.embedding.weight", "backbone.layers.1.mixer.in_proj.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_named(where: str, value: float, temperature: float) -> None:
    model = small_model("mamba2").eval()
    with torch.no_grad():
        model.get_parameter(where)[3, 3] = value
    for prompts in ([[1, 2]], [[1, 2], [4]]):
        with pytest.raises(UserError, match=rf"the weights of this model are not finite .*{where}"):
            list(generate_batch(model, prompts, temperature=temperature))


def test_scores_that_overflow_are_told_apart_from_broken_weights() -> None:
    """Also when the first of them comes after some tokens."""
    model = small_model("mamba1", tie_embeddings=False).eval()
    with torch.no_grad():
        model.backbone.embedding.weight[7] = 3e38
    tokens = generate_batch(model, [[1, 2]], temperature=0, first_tokens={0: [7]})
    assert next(tokens) == (0, 7)
    with pytest.raises(UserError, match="scores of the next token are not finite in float32, though its weights are"):
        next(tokens)


def test_a_prompt_is_neither_cut_nor_filled_up(reciter: LoadedModel) -> None:
    """Whatever the tokenizer's file says; and the tokenizer of the caller stays as it is."""
    begin = "<|endoftext|>Drei naïve Mäuse"
    expected = reciter.generate([begin, ""], temperature=0)
    cutting = Tokenizer.from_str(reciter.tokenizer.to_str())
    cutting.enable_truncation(2)
    cutting.enable_padding(length=9, pad_id=5)
    before = cutting.to_str()
    assert LoadedModel(reciter.model, cutting, (END,)).generate([begin, ""], temperature=0) == expected
    assert cutting.to_str() == before and cutting.truncation is not None and cutting.padding is not None


def test_a_prompt_that_is_not_utf_8_is_told() -> None:
    tokenizer = bytes_tokenizer()
    model = small_model("mamba1", vocab_size=vocab_size(tokenizer))
    with pytest.raises(UserError, match="is not UTF-8"):
        list(generate_text(model, tokenizer, ["caf\udce9"]))


@pytest.mark.parametrize("stop", [".", ["."], [5, "."]])
def test_text_among_token_ids_that_stop_is_a_mistake(stop: Any) -> None:
    """It would match no token, and the end of a text would no longer end it."""
    tokenizer = bytes_tokenizer()
    model = small_model("mamba1", vocab_size=vocab_size(tokenizer))
    with pytest.raises(UserError, match="takes token ids; to end before a text, give it as stop_strings"):
        generate_text(model, tokenizer, ["a"], stop=stop)
    with pytest.raises(UserError, match="takes token ids"):
        generate_batch(model, [[1]], stop=stop)
