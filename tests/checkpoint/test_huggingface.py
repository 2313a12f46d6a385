"""Parity with transformers: logits, gradients of all parameters, and weights both ways, bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, perturb
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import mambakit
from mambakit import MambaLM, ModelConfig, ops
from mambakit.checkpoint import CheckpointError, huggingface
from mambakit.checkpoint import files as checkpoint_files

transformers = pytest.importorskip("transformers", reason="pip install 'mambakit[test]'")

CASES: dict[str, dict[str, Any]] = {
    "mamba": {"kind": "mamba1", "d_model": 48},
    "mamba-odd": {
        "kind": "mamba1", "d_model": 40, "state_size": 5, "conv_width": 3, "dt_rank": 7, "bias": True,
        "conv_bias": False, "tie_embeddings": False, "norm_eps": 1e-3,
    },
    "mamba-wide": {"kind": "mamba1", "d_model": 32, "expand": 3, "vocab_multiple": 16},
    "mamba2": {"kind": "mamba2", "d_model": 48, "head_dim": 16},
    "mamba2-odd": {
        "kind": "mamba2", "d_model": 40, "head_dim": 8, "state_size": 12, "conv_width": 2, "bias": True,
        "conv_bias": False, "tie_embeddings": False, "chunk_size": 16, "norm_eps": 1e-3,
    },
    "mamba2-groups": {"kind": "mamba2", "d_model": 48, "head_dim": 8, "num_groups": 4, "gated_norm": "width"},
    "nemotron": {"kind": "mamba2", "d_model": 48, "head_dim": 8, "num_groups": 4, "tie_embeddings": False},
    "nemotron-tied": {"kind": "mamba2", "d_model": 48, "head_dim": 16, "num_groups": 2, "vocab_multiple": 16},
    "nemotron-odd": {
        "kind": "mamba2", "d_model": 40, "head_dim": 8, "num_groups": 5, "state_size": 12, "conv_width": 3, "bias": True,
        "conv_bias": False, "chunk_size": 16, "norm_eps": 1e-3, "tie_embeddings": False,
    },
    "falcon": {"kind": "mamba1", "d_model": 48, "bcdt_norm": True, "tie_embeddings": False},
    "falcon-odd": {"kind": "mamba1", "d_model": 40, "state_size": 7, "bcdt_norm": True, "bcdt_norm_eps": 1e-4},
}  # fmt: skip
CLASSES = {
    "mamba": "MambaForCausalLM", "mamba2": "Mamba2ForCausalLM", "nemotron": "NemotronHForCausalLM",
    "falcon": "FalconMambaForCausalLM",
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES)


def _model(case: str) -> MambaLM:
    model = MambaLM(ModelConfig(num_layers=3, vocab_size=101, **CASES[case]))
    perturb(model)
    return model


def _open(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info  # nothing missing, unexpected or of another shape
    return model


def _same_weights(a: MambaLM, b: MambaLM) -> bool:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(name == other and torch.equal(p, q) and p.dtype == q.dtype for (name, p), (other, q) in pairs)


@every_case
def test_logits_and_all_gradients_are_transformers(case: str, tmp_path: Path) -> None:
    ours = _model(case)
    huggingface.write(ours, tmp_path / "model")
    theirs = _open(tmp_path / "model")
    assert type(theirs).__name__ == CLASSES[case.split("-")[0]]
    tokens = torch.randint(0, 101, (2, 70))
    weights = torch.randn(2, 70, ours.config.padded_vocab_size)

    my_logits, their_logits = ours(tokens).logits, theirs(tokens).logits
    assert_close(my_logits, their_logits, 1e-5, "logits")
    (my_logits * weights).sum().backward()
    (their_logits * weights).sum().backward()
    gradients = {huggingface.our_name(name): p.grad for name, p in theirs.named_parameters()}
    if case == "nemotron-tied":  # which transformers does not tie
        gradients["backbone.embedding.weight"] += gradients.pop("lm_head.weight")
    assert gradients.keys() == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, gradients[name], 2e-5, name)


@every_case
def test_reference_backend_is_transformers_too(case: str, tmp_path: Path) -> None:
    ours = _model(case)
    huggingface.write(ours, tmp_path / "model")
    tokens = torch.randint(0, 101, (2, 9))
    with ops.backend("reference"):
        assert_close(ours(tokens).logits, _open(tmp_path / "model")(tokens).logits, 1e-5)


@every_case
def test_weights_go_there_and_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Ours -> their form -> transformers -> saved by transformers -> ours; config and every weight unchanged."""
    ours = _model(case)
    huggingface.write(ours, tmp_path / "ours")
    straight = mambakit.load(tmp_path / "ours").model
    assert straight.config == ours.config
    assert _same_weights(straight, ours)

    _open(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    back = mambakit.load(tmp_path / "theirs").model
    assert back.config == ours.config
    assert _same_weights(back, ours)


VLLM_SHARED = (
    "architectures vocab_size hidden_size num_hidden_layers conv_kernel use_conv_bias use_bias layer_norm_epsilon"
)
VLLM_KEYS = {  # that vLLM's classes of these names read, beside those
    "mamba": "state_size intermediate_size time_step_rank hidden_act tie_word_embeddings",
    "falcon": "state_size intermediate_size time_step_rank hidden_act tie_word_embeddings mixer_rms_eps",
    "mamba2": "state_size expand n_groups num_heads head_dim hidden_act tie_word_embeddings",
    "nemotron": "ssm_state_size n_groups mamba_num_heads mamba_head_dim mamba_hidden_act hybrid_override_pattern",
}


@pytest.mark.parametrize("case", VLLM_KEYS)
def test_the_config_has_what_vllm_reads(case: str, tmp_path: Path) -> None:
    huggingface.write(_model(case), tmp_path / "ours")
    values = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {*VLLM_SHARED.split(), *VLLM_KEYS[case].split()} <= values.keys()


THEIR_CONFIGS: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 6, "expand": 3, "use_bias": True},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 10},
    "FalconMamba": {"state_size": 6, "mixer_rms_eps": 1e-5},
}


@pytest.mark.parametrize("family", THEIR_CONFIGS)
def test_models_made_by_transformers_are_read(family: str, tmp_path: Path) -> None:
    """A folder that never saw mambakit: no settings of ours in it, and back again bit for bit."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, **THEIR_CONFIGS[family]
    )
    theirs = getattr(transformers, f"{family}ForCausalLM")(config)
    perturb(theirs)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20kB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()  # several files
    loaded = mambakit.load(tmp_path / "theirs")
    tokens = torch.randint(0, 60, (2, 33))
    assert_close(loaded.model(tokens).logits, theirs(tokens).logits, 1e-5)
    _assert_same_continuation(theirs, tmp_path / "theirs", 60)
    assert loaded.tokenizer is None

    huggingface.write(loaded.model, tmp_path / "back")
    for (name, p), (other, q) in zip(
        theirs.named_parameters(), _open(tmp_path / "back").named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(p, q), name


def test_resized_by_transformers_is_read_at_its_new_size(tmp_path: Path) -> None:
    """transformers keeps our settings in config.json as they were; its own keys must win."""
    huggingface.write(_model("mamba"), tmp_path / "ours")
    theirs = _open(tmp_path / "ours")
    theirs.resize_token_embeddings(120, mean_resizing=False)
    theirs.save_pretrained(tmp_path / "resized")
    model = mambakit.load(tmp_path / "resized").model
    assert (model.config.vocab_size, model.config.padded_vocab_size) == (120, 120)
    tokens = torch.randint(0, 120, (1, 9))
    assert_close(model(tokens).logits, theirs(tokens).logits, 1e-5)


@every_case
def test_transformers_continues_a_prompt_greedily_as_we_do(case: str, tmp_path: Path) -> None:
    huggingface.write(_model(case), tmp_path / "ours", end_tokens=[100])
    _assert_same_continuation(_open(tmp_path / "ours"), tmp_path / "ours", 101)


def _assert_same_continuation(theirs: Any, folder: Path, vocabulary: int, num_tokens: int = 200) -> None:
    prompt = torch.randint(1, vocabulary - 1, (1, 8))
    options: dict[str, Any] = {"max_new_tokens": num_tokens, "eos_token_id": None, "pad_token_id": 0}
    ours = mambakit.load(folder)
    padded = list(range(vocabulary, ours.model.config.padded_vocab_size))  # ids that we never pick
    expected = theirs.generate(prompt, do_sample=False, suppress_tokens=padded or None, **options)[0, 8:].tolist()
    assert len(expected) == num_tokens
    assert ours.generate(prompt[0].tolist(), max_new_tokens=num_tokens, temperature=0, stop=()) == expected


@pytest.mark.parametrize("case", ["mamba", "mamba2", "nemotron", "falcon"])
def test_the_trainer_of_transformers_takes_a_step_on_our_folder(case: str, tmp_path: Path) -> None:
    huggingface.write(_model(case), tmp_path / "ours")
    model = _open(tmp_path / "ours")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 101, (4, 16))]
    arguments = transformers.TrainingArguments(
        tmp_path / "trained", max_steps=1, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none",
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    assert math.isfinite(trainer.train().training_loss)
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    trainer.save_model(tmp_path / "again")
    loaded = mambakit.load(tmp_path / "again").model
    tokens = torch.randint(0, 101, (2, 9))
    assert_close(loaded(tokens).logits, model.eval()(tokens, use_cache=False).logits, 1e-5)


def test_a_nemotron_with_other_layers_or_a_bound_on_dt_is_refused(tmp_path: Path) -> None:
    huggingface.write(_model("nemotron"), tmp_path / "ours")
    values = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (values["model_type"], values["hybrid_override_pattern"]) == ("nemotron_h", "MMM")
    for changes, message in (
        ({"hybrid_override_pattern": "M*M"}, "other layers than Mamba-2"),
        ({"layers_block_type": ["linear_attention", "mlp", "mamba"]}, "other layers than Mamba-2"),
        ({"time_step_min": 0.001}, "time_step_min=0.001, by which transformers bounds dt in a prompt"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'; mambakit computes silu alone"),
        ({"ssm_state_size": 9}, "do not fit its config.json"),
    ):
        (tmp_path / "ours" / "config.json").write_text(json.dumps({**values, **changes}))
        with pytest.raises(CheckpointError, match=message):
            mambakit.load(tmp_path / "ours")


def test_a_tied_nemotron_that_was_trained_untied_is_read_untied(tmp_path: Path) -> None:
    huggingface.write(_model("nemotron-tied"), tmp_path / "ours")
    assert mambakit.load(tmp_path / "ours").model.config.tie_embeddings
    theirs = _open(tmp_path / "ours")
    with torch.no_grad():
        theirs.lm_head.weight += 1
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = mambakit.load(tmp_path / "theirs").model
    assert not loaded.config.tie_embeddings
    tokens = torch.randint(0, 101, (1, 9))
    assert_close(loaded(tokens).logits, theirs(tokens).logits, 1e-5)


def test_bf16_weights_stay_bf16_but_A_D_and_dt_bias(tmp_path: Path) -> None:
    ours = _model("mamba2").bfloat16()
    huggingface.write(ours, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = mambakit.load(tmp_path / "model").model
    assert _same_weights(loaded, ours)
    assert loaded.backbone.embedding.weight.dtype == torch.bfloat16
    assert loaded.backbone.layers[0].mixer.A_log.dtype == torch.float32
    wide = mambakit.load(tmp_path / "model", dtype=torch.float32).model
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


@pytest.mark.parametrize("num_groups", [1, 2])
def test_what_transformers_cannot_compute_is_refused(num_groups: int, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"d_model": 32, "head_dim": 8, "num_layers": 2, "vocab_size": 30, "num_groups": num_groups}
    config = ModelConfig(kind="mamba2", dt_limit=(0.0, 0.1), **sizes)
    model = MambaLM(config)
    reason = r"bounds dt by dt_limit=\(0.0, 0.1\), which transformers' Mamba2 forgets when it decodes"
    with pytest.raises(CheckpointError, match=reason):
        huggingface.write(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())

    mambakit.save(model, tmp_path / "model", to="native")
    assert mambakit.load(tmp_path / "model").model.config == config
    assert _same_weights(mambakit.load(tmp_path / "model").model, model)
    with pytest.raises(ValueError, match="mambakit"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_tokenizer_travels_and_generates_text(tmp_path: Path) -> None:
    words = {word: i for i, word in enumerate(["<eos>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model = MambaLM(ModelConfig(kind="mamba2", d_model=32, head_dim=8, num_layers=2, vocab_size=9, vocab_multiple=16))
    huggingface.write(model, tmp_path / "model", tokenizer=tokenizer, end_tokens=[0])
    loaded = mambakit.load(tmp_path / "model")
    assert loaded.end_tokens == (0,)
    text = loaded.generate("abc", max_new_tokens=20, seed=3)
    assert isinstance(text, str)
    assert text == loaded.generate("abc", max_new_tokens=20, seed=3)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert theirs("abc")["input_ids"] == tokenizer.encode("abc").ids
    assert theirs.eos_token == "<eos>"


def _folder(tmp_path: Path, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    huggingface.write(_model("mamba"), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    values = {**json.loads(path.read_text()), **changes} if config is None else config
    path.write_text(json.dumps(values))
    return tmp_path / "model"


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama"}, "model_type='llama'; mambakit reads mamba, mamba2, falcon_mamba, nemotron_h, mambakit"),
    ({"model_type": ["mamba"]}, r"model_type=\['mamba'\]; mambakit reads"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'; mambakit computes silu alone"),
    ({"intermediate_size": 100}, "inner width of 100; need a multiple of hidden_size=48"),
    ({"state_size": 17}, r"A_log has shape \(96, 16\), need \(96, 17\)"),
    ({"num_hidden_layers": 4}, "says 4 layers, but the weights have 3"),
    ({"num_hidden_layers": 10**9}, "num_layers=1000000000: need less than or equal to 4096"),
    ({"hidden_size": "wide"}, "config.json does not describe a model mambakit knows"),
    ({"hidden_size": 48.5}, "inner width of 96; need a multiple of hidden_size=48.5"),
    ({"hidden_size": 10**400, "intermediate_size": 10**400}, "does not describe a model mambakit knows: d_model=1000"),
    ({"state_size": True}, "state_size=True: need a whole number"),
    ({"use_conv_bias": False}, "conv1d.bias is not part of such a model"),
    ({"use_bias": True}, "in_proj.bias is missing"),
    ({"mambakit": {"vocab_multiple": 0}}, "config.json does not describe a model mambakit knows"),
    ({"mambakit": {"vocab_multiple": "8"}}, "config.json does not describe a model mambakit knows"),
    ({"mambakit": [1]}, "need an object of settings"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[str(c)[:30] for c, _ in BROKEN])
def test_a_config_that_does_not_fit_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        mambakit.load(_folder(tmp_path, **changes))


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[: len(good) // 2])
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        mambakit.load(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match="has no weights; need model.safetensors"):
        mambakit.load(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="need plain file names"):
        mambakit.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is not valid JSON"):
        mambakit.load(folder)
    (folder / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="config.json is not valid JSON"):
        mambakit.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json does not exist"):
        mambakit.load(folder)
    with pytest.raises(CheckpointError, match="is not a folder"):
        mambakit.load(folder / "nothing")


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        huggingface.write(_model("mamba"), tmp_path / "model")
    assert (tmp_path / "model" / "notes.txt").read_text() == "keep me"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint_files, "write_weights", full_disk)
    with pytest.raises(OSError, match="no space"):
        huggingface.write(_model("mamba"), tmp_path / "model")
    assert not list(tmp_path.iterdir())


PUBLISHED: dict[str, dict[str, Any]] = {
    # The keys that matter, as the published folders have them. Falcon's expand is not what its width says.
    "falcon-mamba-7b": {
        "model_type": "falcon_mamba", "hidden_size": 4096, "intermediate_size": 8192, "expand": 16,
        "num_hidden_layers": 64, "state_size": 16, "conv_kernel": 4, "time_step_rank": 256, "vocab_size": 65024,
        "tie_word_embeddings": False, "layer_norm_epsilon": 1e-05, "use_bias": False, "use_conv_bias": True,
    },
    "mamba2-7b": {
        "model_type": "mamba2", "hidden_size": 4096, "expand": 2, "num_hidden_layers": 64, "state_size": 128,
        "num_heads": 128, "head_dim": 64, "n_groups": 8, "vocab_size": 32768, "tie_word_embeddings": False,
    },
    "mamba-130m": {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280},
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_configs_have_the_presets_parameters(preset: str) -> None:
    config = huggingface.config_from_huggingface(PUBLISHED[preset])
    assert config.num_parameters() == ModelConfig.preset(preset).num_parameters()
    assert config.gated_norm == ("width" if preset == "mamba2-7b" else "group")


def _stored(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    huggingface.write(_model("mamba"), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    return path, load_file(path)


def test_weights_of_several_or_wrong_dtypes_are_refused(tmp_path: Path) -> None:
    path, weights = _stored(tmp_path)
    name = "backbone.layers.0.mixer.out_proj.weight"
    save_file({**weights, name: weights[name].bfloat16()}, path)
    with pytest.raises(CheckpointError, match="have dtypes bfloat16, float32; need one floating-point dtype, or name"):
        mambakit.load(tmp_path / "model")
    assert (
        mambakit.load(tmp_path / "model", dtype=torch.float32).model(torch.zeros(1, 3).long()).logits.isfinite().all()
    )
    for other in (name, "backbone.layers.0.mixer.A_log"):
        save_file({**weights, other: weights[other].long()}, path)
        with pytest.raises(CheckpointError, match="have dtypes float32, int64"):
            mambakit.load(tmp_path / "model", dtype=torch.float32)


def test_fp64_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    ours = _model("mamba2").double()
    huggingface.write(ours, tmp_path / "model")
    assert _same_weights(mambakit.load(tmp_path / "model").model, ours)
    for dtype in (torch.float64, torch.float32):
        loaded = mambakit.load(tmp_path / "model", dtype=dtype).model
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    path, weights = _stored(tmp_path)
    save_file({**weights, "lm_head.weight": weights["backbone.embeddings.weight"] + 1}, path)
    with pytest.raises(CheckpointError, match="ties the output layer to the embedding, but the two differ"):
        mambakit.load(tmp_path / "model")


def test_several_end_tokens_all_stop(tmp_path: Path) -> None:
    loaded = mambakit.load(_folder(tmp_path, eos_token_id=[3, 5]))
    assert loaded.end_tokens == (3, 5)
    huggingface.write(loaded.model, tmp_path / "again", end_tokens=loaded.end_tokens)
    assert mambakit.load(tmp_path / "again").end_tokens == (3, 5)
    huggingface.write(loaded.model, tmp_path / "endless")
    assert mambakit.load(tmp_path / "endless").end_tokens == ()


def test_infinite_dt_limit_is_read_in_every_spelling(tmp_path: Path) -> None:
    values = huggingface.config_to_huggingface(
        ModelConfig(kind="mamba2", d_model=32, head_dim=8, num_layers=1, vocab_size=9)
    )
    for infinity in (math.inf, "Infinity", {"__float__": "Infinity"}):
        read = huggingface.config_from_huggingface({**values, "time_step_limit": [0.0, infinity]})
        assert read.dt_limit == (0.0, math.inf)
    for wrong in (["a", "b"], [0, 10**400], 5):
        with pytest.raises(CheckpointError, match="does not describe a model mambakit knows"):
            huggingface.config_from_huggingface({**values, "time_step_limit": wrong})


def test_files_hold_each_weight_once(tmp_path: Path) -> None:
    """A tied output layer is not stored again, and load_file sees plain named tensors."""
    huggingface.write(_model("mamba"), tmp_path / "model")
    stored: dict[str, Tensor] = load_file(tmp_path / "model" / "model.safetensors")
    assert "backbone.embeddings.weight" in stored
    assert "lm_head.weight" not in stored
    save_file(
        {**stored, "lm_head.weight": stored["backbone.embeddings.weight"].clone()},
        tmp_path / "model" / "model.safetensors",
    )
    mambakit.load(tmp_path / "model")  # a stored copy of a tied weight does no harm
