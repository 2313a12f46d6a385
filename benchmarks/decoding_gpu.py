"""How fast is decoding on one GPU, and which part of a token takes how long?

    python benchmarks/decoding_gpu.py --out decoding.json                        all figures, about four minutes
    python benchmarks/decoding_gpu.py --out tiles.json --tune                    all tiles first, for 1 row and 64
    python benchmarks/decoding_gpu.py --out loss.json --checkpoint DIR --text FILE   what weights of 8 bits cost

Weights are random: they take the same time. A text is a prompt of 100 tokens and 100 new ones, the likeliest each time.
tokens/s are new tokens of all rows over the time of everything, the prompts included, as mamba-ssm's own benchmark has
it; of seven texts after a first that compiles, the median, and the least and the most. `step` is the time of a replay
of the step's graph alone, and `bandwidth` what it must move (all weights; all states twice) over that time. `parts` are
graphs of one part of all layers each. Results are written after each model. --tune tries other sizes of each kernel,
takes the fastest, and then measures; `MEASURED` and `MEASURED_FOR_64` of the results are what it took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch.profiler import ProfilerActivity, profile

from mambakit import MambaLM, ModelConfig
from mambakit.decoding import Choice, Decoder, Sampling
from mambakit.decoding.graphs import GraphStepper
from mambakit.decoding.sampling import Needs
from mambakit.decoding.stepping import Stepper
from mambakit.model.int8 import quantize_
from mambakit.ops.gpu import decode

MODELS = ["mamba-130m", "mamba-2.8b", "mamba2-130m", "mamba2-2.7b"]
PROMPT, NEW, TIMES = 100, 100, 7
GREEDY = Choice(Sampling(temperature=0))
WARM = Choice(Sampling(temperature=0.8, top_p=0.9))


def random_model(preset: str, dtype: str) -> MambaLM:
    with torch.device("cuda"):
        model = MambaLM(ModelConfig.preset(preset))
    model = model.to(torch.bfloat16).eval()
    return quantize_(model) if dtype == "int8" else model


def seconds(work: Callable[[], Any], times: int) -> float:
    """Of one of several calls, on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / times


def captured(work: Callable[[], Any]) -> Callable[[], None]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def copy_bandwidth() -> float:
    """Bytes read and written in a second."""
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), 10)


class Texts:
    """One decoder that is used again and again, as a server has it."""

    def __init__(self, model: MambaLM, rows: int) -> None:
        self.decoder, self.rows = Decoder(model, rows), rows
        self.prompts = torch.randint(0, model.config.vocab_size, (rows, PROMPT)).tolist()

    def __call__(self) -> tuple[float, float]:
        """(seconds of everything, of reading the prompts)."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        memories = self.decoder.read(self.prompts)
        self.decoder.add({row: (memory, GREEDY) for row, memory in enumerate(memories)})
        torch.cuda.synchronize()
        read = time.perf_counter() - start
        for _ in range(NEW):
            self.decoder.step()
        taken = time.perf_counter() - start
        self.decoder.drop(range(self.rows))
        return taken, read


@torch.inference_mode()
def measure(model: MambaLM, rows: int, with_parts: bool, with_profile: bool) -> dict[str, Any]:
    texts = Texts(model, rows)
    start = time.perf_counter()
    texts()
    first = time.perf_counter() - start
    texts()
    runs = [texts() for _ in range(TIMES)]
    totals, reads = [total for total, _ in runs], [read for _, read in runs]
    stepper, settings = texts.decoder._stepper, texts.decoder._settings
    assert isinstance(stepper, GraphStepper), "no kernels for this model"
    found: dict[str, Any] = {
        "tokens_per_second": rows * NEW / statistics.median(totals),
        "least_and_most": [rows * NEW / max(totals), rows * NEW / min(totals)],
        "ms_of_the_prompts": 1000 * statistics.median(reads), "first_seconds": first,
    }  # fmt: skip
    for name, choice in ("step", GREEDY), ("step_at_temperature", WARM):
        settings.put(0, [choice] * rows, [0] * rows, torch.zeros_like(settings.seen[:rows]))
        needs = Needs.of([choice])
        stepper.step(rows, settings, needs)
        found[f"{name}_us"] = 1e6 * seconds(lambda needs=needs: stepper.step(rows, settings, needs), 50)  # type: ignore[misc]
    moved = weight_bytes(model) + 2 * sum(block[:rows].nbytes for block in stepper._blocks.values())
    found |= {"moved_bytes": moved, "bandwidth": moved / found["step_us"] * 1e6}
    found["error"] = error(model, stepper, rows)
    if with_parts:
        found["parts"] = parts(stepper, rows)
    if with_profile:
        found["kernels"] = profiled(lambda: stepper.step(rows, settings, Needs.of([GREEDY])))
    return found


def weight_bytes(model: MambaLM) -> int:
    """That a token reads: of an embedding that is not the output layer, next to nothing."""
    embedding = 0 if model.config.tie_embeddings else model.backbone.embedding.weight.nbytes
    return sum(parameter.nbytes for parameter in model.parameters()) - embedding


def error(model: MambaLM, stepper: GraphStepper, rows: int) -> float:
    """Difference of the scores from those of torch's operators, by norms: about 0.01 is rounding to bf16."""
    plain = Stepper(model, stepper.state.map(lambda tensor: tensor[:1]), rows)
    for own, other in zip(plain.state.tensors(), stepper.state.tensors(), strict=True):
        own.copy_(other[:rows])
    plain.tokens.copy_(stepper.tokens[:rows])
    ours, theirs = stepper._scores(rows), plain._scores(rows).float()
    return float((ours - theirs).norm() / theirs.norm())


def parts(stepper: GraphStepper, rows: int) -> dict[str, dict[str, float]]:
    """Microseconds of one launch of each part, and what it moves in a second."""
    kernels = stepper.kernels
    count = len(kernels.layers)
    found = {}
    for part in kernels.parts(rows):
        replay = captured(lambda part=part: [part(layer, rows) for layer in kernels.layers])  # type: ignore[misc]
        layer = kernels.layers[0]
        matrix = getattr(layer, part.__name__, None)
        moved = matrix.weight.nbytes if matrix else 2 * layer.state[:rows].nbytes
        taken = seconds(replay, 20) / count
        found[part.__name__] = {"us": 1e6 * taken, "bandwidth": moved / taken}
    replay = captured(lambda: [kernels.project_to_scores(rows) for _ in range(4)])
    taken = seconds(replay, 20) / 4
    found["output layer"] = {"us": 1e6 * taken, "bandwidth": kernels.head.weight.nbytes / taken}
    return found


def profiled(work: Callable[[], Any], times: int = 5) -> list[dict[str, Any]]:
    """Kernels of a step, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as told:
        for _ in range(times):
            work()
        torch.cuda.synchronize()
    events = sorted(told.key_averages(), key=lambda event: -event.self_device_time_total)[:12]
    return [
        {"name": event.key[:60], "launches": event.count / times, "us": event.self_device_time_total / times}
        for event in events
    ]


def matvec_tiles(inputs: int, weight_bytes: int, most_splits: int) -> list[decode.MatvecTile]:
    found = []
    for block, warps in itertools.product((4, 8, 16, 32, 64), (4, 8)):
        width, of_a_thread = 16 * warps, max(1, block // 2)
        for splits in (1, 2, 4) if most_splits > 1 else (1,):
            count = -(-inputs // (width * splits))
            sizes = {
                max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or n * of_a_thread <= most))
                for most in ((32, 64, 128) if weight_bytes == 1 else (16, 32, 64))
            }
            found += [decode.MatvecTile(block, width, tiles, warps, splits) for tiles in sorted(sizes)]
    return found


def product_tiles(name: str) -> list[decode.ProductTile]:
    wide = [(64, 64, 4, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4)]
    narrow = [(16, 128, 4, 5), (32, 128, 4, 5)]
    tiles, splits = {
        "x_proj": ([*narrow, *wide[:2]], (2, 4)),
        "dt_proj": (list(itertools.product((32, 64), (32,), (4, 8), (1, 2, 3))), (1,)),
        "out_proj": ([*wide, narrow[1]], (1, 2, 4)),
    }.get(name, ([*wide, *narrow, (128, 128, 8, 3)], (1,)))
    return [decode.ProductTile(64, *tile, parts) for tile in tiles for parts in splits]


CHANNEL_TILES = [(4, 32, 4), (2, 64, 4), (8, 32, 8), (8, 16, 4), (16, 16, 4), (1, 64, 4), (4, 16, 2)]
HEAD_TILES = [(8, 4), (16, 4), (16, 8), (32, 4), (32, 8), (64, 8)]


@torch.inference_mode()
def tune(model: MambaLM, rows: int) -> list[dict[str, Any]]:
    """Microseconds of each tile for each part of a layer and for the output layer. The fastest is first, and taken."""
    stepper = GraphStepper(model, model.initial_state(1), rows)
    kernels, found = stepper.kernels, []

    def try_all(name: str, work: Callable[[], Any], count: int, tiles: list[Any], use: Callable[[Any], Any]) -> None:
        def time_of(tile: Any) -> float:
            use(tile)
            decode.matvec_tile.cache_clear()
            decode.product_tile.cache_clear()
            return 1e6 * seconds(captured(work), 10) / count

        times = {tile: time_of(tile) for tile in tiles}
        order = sorted(times, key=lambda tile: times[tile])
        time_of(order[0])
        found.append({"part": name, "us": [[*tile, round(times[tile], 2)] for tile in order]})
        print(name, found[-1]["us"], flush=True)

    for part in [*kernels.parts(rows), kernels.project_to_scores]:
        is_head, layers = part == kernels.project_to_scores, kernels.layers
        every: list[tuple[Any, ...]] = [(rows,)] * 4 if is_head else [(layer, rows) for layer in layers]
        matrix = kernels.head if is_head else getattr(layers[0], part.__name__, None)
        work = lambda part=part, every=every: [part(*each) for each in every]  # noqa: E731
        if matrix is None:
            if rows > decode.FEW:
                name, tiles = ("CHANNELS_OF_MANY", CHANNEL_TILES) if layers[0].x_proj else ("HEAD_OF_MANY", HEAD_TILES)
                use = lambda tile, name=name: setattr(decode, name, tile)  # noqa: E731
                try_all(f"{name}, now {getattr(decode, name)}", work, len(every), tiles, use)  # type: ignore[misc]
            continue
        outputs, inputs = matrix.weight.shape
        key, is_x = (outputs, inputs, matrix.weight.element_size()), matrix is layers[0].x_proj
        table: dict[Any, Any] = decode.MEASURED if rows == 1 else decode.MEASURED_FOR_64
        choices: list[Any] = product_tiles(part.__name__)
        if rows == 1:
            choices = matvec_tiles(inputs, key[2], decode.SPLITS_OF_X if is_x else 1)
        use = lambda tile, key=key, table=table: table.update({key: tile})  # type: ignore[misc] # noqa: E731
        try_all(f"{part.__name__} {key}, now {[*table.get(key, ())]}", work, len(every), choices, use)  # type: ignore[misc]
    return found


@torch.inference_mode()
def perplexities(checkpoint: Path, text: Path) -> dict[str, float]:
    """Per token, over windows of 2048 tokens, in bf16 and with weights of 8 bits."""
    from mambakit import load

    opened = load(checkpoint, dtype=torch.bfloat16)
    assert opened.tokenizer is not None, f"{checkpoint} has no tokenizer"
    tokens = torch.tensor(opened.tokenizer.encode(text.read_text(encoding="utf-8")).ids)
    windows = tokens[: len(tokens) // 2049 * 2049].view(-1, 2049)
    found = {}
    model = opened.model.cuda().eval()
    for name in "bfloat16", "int8":
        model = quantize_(model) if name == "int8" else model
        loss, count = 0.0, 0
        for window in windows.cuda().split(8):
            logits = model(window[:, :-1]).logits.float()
            loss += float(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="sum")
            )
            count += window[:, 1:].numel()
        found[name] = math.exp(loss / count)
    return {**found, "ratio": found["int8"] / found["bfloat16"], "tokens": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--late", action="store_true", help="no kernel begins before the one before it has ended")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--text", type=Path)
    given = parser.parse_args()
    if given.late:
        decode.can_begin_early = lambda device: False  # type: ignore[assignment]
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "copy_bandwidth": copy_bandwidth(),
    }  # fmt: skip
    print(results)

    def keep(name: str, value: Any) -> None:
        results[name] = value
        given.out.write_text(json.dumps(results, indent=1), encoding="utf-8")

    if given.checkpoint and given.text:
        keep("perplexity", perplexities(given.checkpoint, given.text))
        print(results["perplexity"])
        return
    for preset in given.models:
        for dtype in given.dtypes:
            model = random_model(preset, dtype)
            for rows in given.rows:
                if given.tune:
                    keep(f"tiles for {preset} {dtype} {rows}", tune(model, rows))
                    for name in "MEASURED", "MEASURED_FOR_64":
                        keep(name, [[*key, *tile] for key, tile in getattr(decode, name).items()])
                found = measure(model, rows, with_parts=True, with_profile=given.profile)
                share = found["bandwidth"] / results["copy_bandwidth"]
                print(
                    f"{preset} {dtype} {rows} rows: {found['tokens_per_second']:,.0f} tok/s, prompts "
                    f"{found['ms_of_the_prompts']:.1f} ms, step {found['step_us']:.0f} µs ({share:.0%} of a copy's "
                    f"bandwidth; at temperature {found['step_at_temperature_us']:.0f}), error {found['error']:.4f}, "
                    f"first {found['first_seconds']:.1f} s",
                    flush=True,
                )
                for name, part in found["parts"].items():
                    print(f"    {name}: {part['us']:.2f} µs, {part['bandwidth'] / 1e12:.2f} TB/s")
                for kernel in found.get("kernels", []):
                    print(f"    {kernel['name']}: {kernel['launches']:.0f} launches, {kernel['us']:.1f} µs")
                keep(f"{preset} {dtype} {rows}", found)
            del model
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
