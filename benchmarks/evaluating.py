"""How fast a text is evaluated: one long document, and many short ones, beside a pass of training at equal sizes.

    python benchmarks/evaluating.py --text wiki.test.tokens --tokenizer tokenizer.json [--model NAME] [--out FILE]
    python benchmarks/evaluating.py --text … --tokenizer … --smoke     a small model, on any machine

The weights are random: speed does not depend on them. "before" is the way of version 0.1.0's first days: batches of at
most 8 rows of 1,024 tokens, and a wait for the device after each; its loss must be the same, and it runs in the first
two rounds alone, since it takes long. "pass" is the forward pass
of a training step over as many tokens as evaluation takes at once, in rows of 2,048: with gradients to come, without
its backward pass. All take turns, since a machine may be slow for a while; the first round, which compiles, is told by
itself. On a CPU, rates are per second of CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from mambakit import MambaLM, ModelConfig
from mambakit.data.lanes import document_ranges, lanes
from mambakit.data.prepare import prepare
from mambakit.data.shards import TokenStream
from mambakit.device import autocast
from mambakit.evaluation.baselines import evaluate_model
from mambakit.evaluation.evaluating import place_and_dtype
from mambakit.evaluation.scoring import Score, tokens_at_once
from mambakit.evaluation.text import EvaluatedText
from mambakit.measure import environment

ROWS, LENGTH = 8, 1024  # of batches before
SMOKE: dict[str, Any] = {"kind": "mamba2", "d_model": 256, "num_layers": 4}


def texts(source: Path, tokenizer: Path, folder: Path, most_bytes: int | None) -> dict[str, EvaluatedText]:
    """The text as one document, and each of its lines as one."""
    whole = source.read_text(encoding="utf-8")[:most_bytes]
    (folder / "one.txt").write_text(whole, encoding="utf-8")
    lines = [line for line in whole.splitlines() if line.strip()]
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    found = {}
    for name, file in {"one long document": "one.txt", "many short documents": "lines.jsonl"}.items():
        prepare([folder / file], folder / f"{file}.shards", tokenizer=str(tokenizer), val_fraction=0)
        stream = TokenStream(folder / f"{file}.shards", "train")
        found[name] = EvaluatedText(stream, document_ranges(stream), Tokenizer.from_file(str(tokenizer)))
    return found


def before(model: MambaLM, text: EvaluatedText, dtype: torch.dtype) -> Score:
    state, loss_sum, targets = None, 0.0, 0
    for batch in lanes(text.stream, text.ranges, ROWS, LENGTH):
        batch = batch.to(model.device)
        with torch.inference_mode(), autocast(model.device, dtype):
            output = model(
                batch.tokens,
                doc_ids=batch.doc_ids,
                state=None if state is None else state.keep(batch.carries),
                targets=batch.targets,
                loss_mask=batch.loss_mask,
            )
        state = output.state
        assert output.loss_sum is not None
        assert output.num_targets is not None
        loss_sum += float(output.loss_sum)
        targets += int(output.num_targets)
    return Score(loss_sum, targets)


def training_pass(model: MambaLM, dtype: torch.dtype, num_tokens: int) -> None:
    """Forward passes of a training step, of `num_tokens` together."""
    at_once = min(num_tokens, tokens_at_once(model, dtype))
    length = min(2048, at_once)
    tokens = torch.randint(model.config.vocab_size, (at_once // length, length + 1), device=model.device)
    for _ in range(max(1, num_tokens // tokens[:, 1:].numel())):
        with autocast(model.device, dtype):
            model(tokens[:, :-1], targets=tokens[:, 1:])


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = clock()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--model", default="mamba2-130m")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a small model, and the first 24,000 characters")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device, dtype = place_and_dtype(given.device, given.precision)
    size = Tokenizer.from_file(str(given.tokenizer)).get_vocab_size()
    torch.manual_seed(0)
    config = ModelConfig(**SMOKE, vocab_size=size) if given.smoke else ModelConfig.preset(given.model, vocab_size=size)
    model = MambaLM(config).to(device)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts(given.text, given.tokenizer, Path(folder), 24_000 if given.smoke else None).items():
            ways: dict[str, Callable[[], Any]] = {
                "evaluate": lambda text=text: evaluate_model("model", model, text, dtype, ROWS, None).loss,
                "before": lambda text=text: before(model, text, dtype).loss,
                "pass": lambda text=text: training_pass(model, dtype, text.num_tokens),
            }
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            losses: dict[str, float] = {}
            for number in range(given.rounds + 1):
                for way, work in ways.items():
                    if way == "before" and number > 1:
                        continue
                    took, losses[way] = timed(work, device)
                    seconds[way].append(took)
            rates = {way: [text.num_tokens / each for each in some[1:]] for way, some in seconds.items()}
            found[name] = {
                "tokens": text.num_tokens,
                "documents": len(text.ranges),
                "tokens_per_second": {way: statistics.median(some) for way, some in rates.items()},
                "slowest_and_fastest": {way: [min(some), max(some)] for way, some in rates.items()},
                "first_round_seconds": {way: some[0] for way, some in seconds.items()},
                "relative_difference_of_loss": abs(losses["evaluate"] / losses["before"] - 1),
            }
            print(name, json.dumps(found[name], indent=2))
    record = {
        "model": "smoke" if given.smoke else given.model,
        "parameters": config.num_parameters(),
        "dtype": str(dtype),
        "tokens_at_once": tokens_at_once(model, dtype),
        "clock": "CPU time" if device.type == "cpu" else "wall time",
        "environment": environment(device),
        "results": found,
    }
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
