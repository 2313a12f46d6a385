"""The commands. Each imports what it needs when it is called, so that help and mistakes are quick."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from .. import signals
from ..config import ConfigError, PrepareConfig, read_config, write_yaml
from ..files import UserError, path_of
from ..progress import say
from . import flags
from .flags import Device, Json, PrepareFlags, Separator, SettingsFlags, TextColumn, Words, flag
from .output import print_json, print_line, write

if TYPE_CHECKING:
    from ..bench import ReportPart
    from ..data.shards import Index
    from ..evaluation import Evaluation, TaskEvaluation

# tyro keeps the line breaks of a docstring, so the longest help texts are here.
PART_HELP = (
    "do part I (from 0) of N alone, on one of several machines that share a disk; "
    "the same command without it puts them together"
)
SHAPE_HELP = (
    "sizes by letter, may be given again for more: B batch, L length, D channels, N states, W taps, H heads, "
    "P channels of a head, G groups, V vocabulary; a letter left out is as it is by default"
)
Form = Literal["huggingface", "state-spaces", "native", "split", "safetensors", "npz", "gguf", "onnx"]


def prepare(
    source: Annotated[Positional[tuple[str, ...]], flag(metavar="SOURCE")],
    /,
    out: Annotated[str, arg(metavar="DIR", help="the folder of shards to make")],
    options: Annotated[PrepareFlags, arg(name="")] = {"strict": False},  # noqa: B006 - never changed
    task: Annotated[str | None, flag(PART_HELP, "I/N")] = None,
    sbatch: Annotated[int | None, flag(metavar="N")] = None,
    ray: Annotated[str | None, flag(metavar="ADDRESS")] = None,
    json: Json = False,
) -> int:
    """Turn documents into shards: tokens on disk that training reads.

    Reads text in any encoding, source code, Markdown, HTML, XML, PDF, Word, EPUB, notebooks, JSON, JSON Lines, CSV,
    Parquet and Arrow, and archives of them. A file is a document; where it holds records, each of them is one. What
    cannot be read is skipped, counted, and listed with its reason in prepare.json. Killed, it goes on where it was.

    For example:
      mambakit prepare notes/ --out shards
      mambakit prepare book.txt letters/ --out shards --tokenizer bytes
      mambakit prepare wiki.jsonl.xz --out shards --text-column '{title}\\n\\n{text}' --tokenizer train:16384

    Args:
      source: files and folders of documents, and datasets (hf:NAME)
      sbatch: write a script that does the work as N jobs of a Slurm array, and what puts them together after it
      ray: do the work on a Ray cluster that shares a disk with this machine; local starts one here
    """
    from ..data.prepare import prepare as run
    from ..data.prepare import prepare_part
    from ..data.shards import is_shards, read_index
    from ..data.work_folder import remove, work_folder

    if not out:
        raise UserError("--out is empty; name the folder of shards to make")
    given = flags.typed_section(options, PrepareConfig.model_fields)
    config = PrepareConfig(**{**given, "text_column": _with_newlines(given.get("text_column"))})
    if task is not None:
        part, parts = _part(task)
        prepare_part(part, parts, source, out, **config.model_dump())
        say(f"part {part} of {parts} is done")
        return 0
    if sbatch is not None:
        from ..data.cluster import slurm_script

        script = Path(f"{out}.sbatch.sh")
        script.write_bytes(os.fsencode(slurm_script(source, Path(out), config, sbatch)))
        print_line(f"bash {script}")
        return 0
    if ray is not None:
        from ..data.cluster import on_ray

        on_ray(ray, source, Path(out), config)
    was_there = is_shards(path_of(out))
    try:
        index = run(source, out, **config.model_dump())
        signals.work_is_done()
    except signals.Stopped:
        if was_there or not is_shards(path_of(out)):
            raise
        index = read_index(path_of(out))  # the signal came after the shards got their name: the work is done
        with work_folder(path_of(out)) as work:
            remove(work)
    if json:
        print_json({"out": out, **index.model_dump()})
    else:
        _print_index(index, out)
    return 0


def _print_index(index: Index, out: str) -> None:
    for split, counts in index.counts.items():
        ratio = f", {counts.bytes / counts.tokens:.2f} bytes per token" if counts.tokens else ""
        print_line(f"{split}: {counts.documents:,} documents, {counts.tokens:,} tokens{ratio}")
    if whole := sum(counts.bytes for counts in index.counts.values()):
        held = index.counts["val"].bytes
        by = sorted({source["held_out_by"] for source in index.sources.values()})
        print_line(f"held out for validation: {held:,} bytes of text, {held / whole:.1%}, by {' and '.join(by)}")
    print_line(f"{index.vocab_size:,} token ids, layout {index.layout}; written to {out}")
    say(f"train on it with\n  mambakit train --data {shlex.quote(str(out))}")


def _with_newlines(text_column: str | None) -> str | None:
    """A shell has no easy way to write a newline."""
    return None if text_column is None else text_column.replace("\\n", "\n")


def _part(task: str) -> tuple[int, int]:
    part, _, parts = task.partition("/")
    if not (task.isascii() and part.isdigit() and parts.isdigit()):
        raise UserError(f"--task {task}: need I/N, such as 0/8")
    return int(part), int(parts)


def train(
    config: Annotated[Positional[Path | None], flag(metavar="[CONFIG.yaml|.json]")] = None,
    /,
    data: Annotated[Words, UseAppendAction, flag(metavar="PATH")] = (),
    model: Annotated[str | None, flag("a model by name, such as tiny, small or mamba2-130m", "PRESET")] = None,
    recipe: Annotated[str | None, flag("default, fast, careful, laptop, or paper-130m … paper-1.4b", "NAME")] = None,
    device: Annotated[str | None, flag("where to compute: auto, cpu, cuda, mps, xla, …", "DEVICE")] = None,
    vram: Annotated[str | None, flag("memory of the GPU to fit, such as 24gb; what is free unless set", "SIZE")] = None,
    out: Annotated[Path | None, flag("the run folder; runs/DATE_TIME unless set", "RUN")] = None,
    resume: Annotated[tuple[str, ...] | None, flag(metavar="[CHECKPOINT]")] = None,
    init_from: Annotated[Path | None, flag("start with the weights of another model or run", "CHECKPOINT")] = None,
    write_config: Annotated[Path | None, flag("write the resolved config, and stop", "FILE")] = None,
    gpus: Annotated[int | None, flag("start so many ranks, one for each GPU; without GPUs, on the CPU", "N")] = None,
    profile: Annotated[bool, flag("write a trace of three steps, and say where their time went")] = False,
    json: Json = False,
    settings: Annotated[SettingsFlags, arg(name="")] = {},  # noqa: B006 - never changed
) -> int:
    """Train a model: text or shards in, a run folder with checkpoints and metrics out.

    Ctrl-C saves and says how to go on. A run that goes on from a checkpoint reaches the same bits as one that was not
    stopped. Settings come from the config file, then --model and --recipe, then the other flags; later ones win.

    For example:
      mambakit train --data notes/ --out first --model tiny --recipe laptop
      mambakit train --data shards --out run --model.kind mamba2 --model.d-model 256 --model.num-layers 6
      mambakit train --resume --out run
      mambakit train --resume --out run --train.steps 4000
      mambakit train --data shards --out tuned --init-from run --optim.lr 1e-4
      mambakit train --data letters/ --out adapted --init-from run --lora.rank 16
      mambakit train --data shards --model mamba-130m --recipe paper-130m --write-config run.yaml

    Args:
      config: settings from a file; flags win over it
      data: a folder of shards, or files, folders and datasets (hf:NAME), which are prepared first, once
      resume: go on from the newest good checkpoint of RUN, or from the one named; starts where there is none yet
    """
    if gpus is not None and write_config is None and "RANK" not in os.environ:
        from ..launch.local import run_ranks
        from ..training.run import run_folder

        folder = run_folder(out, resume is not None)
        return run_ranks(gpus, [*flags.words, *(["--out", str(folder)] if out is None else [])], folder)
    # A flag that takes several words takes the config too, if that comes last.
    if resume and config is None and Path(resume[-1]).suffix in (".yaml", ".yml", ".json"):
        config, resume = Path(resume[-1]), resume[:-1]
    sources = flags.flat(data)
    if len(sources) > 1 and config is None and Path(sources[-1]).suffix in (".yaml", ".yml"):
        config = Path(sources.pop())
    named: dict[str, Any] = {"recipe": recipe} if recipe is not None else {}
    named |= {"model": {"preset": model}} if model else {}
    named |= {"data": {"path": sources}} if sources else {}
    named |= {"train": {"vram": vram}} if vram is not None else {}
    named |= {"parallel": {"device": device}} if device is not None else {}
    file = read_config(path_of(config)) if config is not None else {}
    layers: list[Mapping[str, Any]] = [file, named, flags.typed_settings(settings)]
    if resume is not None and (len(resume) > 1 or "" in resume):
        raise ConfigError(f"--resume takes one checkpoint, not {len(resume)}: {' '.join(resume)!r}")
    if write_config is not None:
        if resume is not None:
            raise ConfigError("--write-config writes the config of a new run; leave out --resume")
        return _write_config(write_config, layers, init_from, out)
    from ..signals import STOPPED_AFTER_SAVING
    from ..training.run import train_layers

    go_on = resume is not None and (resume or (True,))[0]
    result = train_layers(layers, out=out, resume=go_on, init_from=init_from, profile=profile)
    if json and result.is_first:
        reached = {name: getattr(result, name) for name in ("step", "total_steps", "best_loss", "stopped_by")}
        print_json({"run": str(result.folder), **reached, "checkpoint": str(result.checkpoint)})
    if result.stopped_by is not None:
        return STOPPED_AFTER_SAVING
    if not result.is_first:
        return 0
    place = shlex.quote(str(result.folder))
    say(f"try\n  mambakit generate {place} --prompt TEXT\n  mambakit report {place}")
    return 0


def _write_config(target: Path, layers: list[Mapping[str, Any]], init_from: Path | None, out: Path | None) -> int:
    from ..training.run import resolved

    if target.exists():
        raise ConfigError(f"{target} exists; choose another name, or remove it first")
    target.write_text(write_yaml(resolved(layers, init_from)), encoding="utf-8")
    more = {"--init-from": init_from, "--out": out}
    given = "".join(f" {flag} {shlex.quote(str(path))}" for flag, path in more.items() if path is not None)
    say(f"written to {target}; train with\n  mambakit train {shlex.quote(str(target))}{given}")
    return 0


def evaluate(
    checkpoint: Annotated[Positional[tuple[Path, ...]], flag(metavar="CHECKPOINT|RUN")],
    /,
    data: Annotated[Words, UseAppendAction, flag(metavar="PATH")] = (),
    tasks: Annotated[Words, UseAppendAction, flag(metavar="NAME[,NAME]")] = (),
    task_path: Annotated[Words, UseAppendAction, flag("folders of task files; --tasks finds theirs", "FOLDER")] = (),
    limit: Annotated[int | None, flag("of each task the first N questions alone, for a quick look", "N")] = None,
    num_fewshot: Annotated[int | None, flag("examples before each question; the task's own unless set", "N")] = None,
    split: Annotated[Literal["val", "train"], arg(help="of a folder of shards")] = "val",
    window: Annotated[int | None, flag("also with documents cut to this many tokens of context", "INT")] = None,
    baseline: Annotated[Words, UseAppendAction, flag(metavar="MODEL")] = (),
    samples: Annotated[int, arg(help="texts to write from the beginnings of documents")] = 0,
    max_tokens: Annotated[int | None, flag(metavar="INT")] = None,
    batch_rows: Annotated[int, arg(help="most documents read side by side")] = 8,
    text_column: TextColumn = None,
    separator: Separator = None,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    int8: Annotated[bool, flag("also with weights of 8 bits, as for generate --int8")] = False,
    device: Device = "auto",
    json: Json = False,
) -> int:
    """Measure a model: how well it predicts a text (--data), or how well it answers tasks (--tasks).

    Of a text: loss, perplexity per token and word, bits per byte. Documents are read whole, with the state carried
    through them. Of tasks: what lm-evaluation-harness measures, with standard errors (pip install 'mambakit[eval]').
    Several models stand in one table. The result is kept in the run for its report.

    For example:
      mambakit evaluate run --data shards
      mambakit evaluate run --data shards --baseline gzip --samples 2
      mambakit evaluate run --data letters/ --window 512 --json
      mambakit evaluate run --data shards --int8
      mambakit evaluate run --tasks lambada_openai,hellaswag,piqa,arc_easy
      mambakit evaluate run other-run --tasks lambada_openai --baseline EleutherAI/pythia-160m --limit 500
      mambakit evaluate run --tasks my-tasks/lambada.yaml
      mambakit evaluate run --tasks mine --task-path my-tasks/ --num-fewshot 2

    Args:
      checkpoint: model folders, or runs, of which the best checkpoint is taken; several are put side by side
      data: a folder of shards, files and folders of text, or files of tokens (.bin, .npy)
      tasks: tasks of lm-evaluation-harness by name, or task files (.yaml) by path
      baseline: put beside it: a model folder, a Hugging Face name; for a text also gzip. A text has the same bytes
      max_tokens: evaluate on so many tokens: documents at even distances, of which the last may be cut
      precision: of matrix products. auto: bf16 or fp16 on a GPU, fp32 on a CPU
    """
    if not checkpoint:
        raise UserError("there is no model; name a run or a model folder")
    sources, names, others = flags.flat(data), flags.flat(tasks), flags.flat(baseline)
    place: dict[str, Any] = {"device": device, "precision": precision}
    if tasks:
        of_text: dict[str, Any] = {
            "--data": sources,
            "--window": window,
            "--samples": samples,
            "--max-tokens": max_tokens,
        }
        of_text |= {"--text-column": text_column, "--separator": separator, "--int8": int8}
        for name, value in of_text.items():
            if value:
                raise UserError(f"{name} is for texts, and --tasks for tasks; give one of the two at a time")
        from ..evaluation import evaluate_tasks

        extent: dict[str, Any] = {"limit": limit, "num_fewshot": num_fewshot, "task_paths": flags.flat(task_path)}
        answers = evaluate_tasks(checkpoint, names, baselines=others, **extent, **place)
        if json:
            print_json(answers.to_json())
        else:
            _print_tasks(answers)
        return 0
    for name, given in {"--limit": limit, "--num-fewshot": num_fewshot, "--task-path": task_path or None}.items():
        if given is not None:
            raise UserError(f"{name} is for tasks; name them with --tasks")
    from ..evaluation import evaluate as run

    text: dict[str, Any] = {"text_column": _with_newlines(text_column), "separator": separator, "split": split}
    extent = {"window": window, "samples": samples, "max_tokens": max_tokens, "batch_rows": batch_rows, "int8": int8}
    found = run(checkpoint[0], sources, baselines=[*map(str, checkpoint[1:]), *others], **place, **text, **extent)
    if json:
        print_json(found.to_json())
    else:
        _print_evaluation(found)
    return 0


def _print_tasks(found: TaskEvaluation) -> None:
    """A line for each figure, a column for each model."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..progress import for_stdout

    table = Table("task", "examples", "questions", "metric")
    for model in found.models:
        table.add_column(Text(for_stdout(model)), justify="right")
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for result in found.results:
        lines.setdefault((result.task, result.metric), {})[result.model] = result
    for (task, metric), by_model in lines.items():
        one = next(iter(by_model.values()))
        better = {True: " ↑", False: " ↓", None: ""}[one.higher_is_better]
        table.add_row(
            Text(for_stdout(task)),
            "–" if one.num_fewshot is None else str(one.num_fewshot),
            "–" if one.samples is None else f"{one.samples:,}",
            Text(for_stdout(metric + better)),
            *(_with_error(by_model.get(model)) for model in found.models),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _with_error(result: Any) -> str:
    if result is None or result.value is None:
        return "–"
    return f"{result.value:,.4g}" + (f" ± {result.stderr:.2g}" if result.stderr is not None else "")


def _print_evaluation(found: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..progress import bold, for_stdout, has_styles, rule

    table = Table("model", "context", "loss", "perplexity", "per word", "bits per byte", "documents", "bytes")
    for result in found.results:
        figures = (result.loss, result.perplexity, result.word_perplexity, result.bits_per_byte)
        table.add_row(
            Text(for_stdout(result.model)),  # no markup of rich's, whatever the name
            "–" if result.targets is None else str(result.window or "whole"),
            *("–" if figure is None else f"{figure:,.4g}" for figure in figures),
            f"{result.documents:,}",
            f"{result.bytes:,}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    mark = "" if has_styles() else "|"  # where the prompt ends
    for number, sample in enumerate(found.samples, 1):
        write(f"\n{rule(f'sample {number} of {len(found.samples)}')}\n")
        write(f"{bold(sample['prompt'])}{mark}{for_stdout(sample['text'])}\n")


def convert(
    source: Annotated[Positional[Path], arg(metavar="SRC", help="a model of any form that can be read, or a run")],
    target: Annotated[Positional[Path], arg(metavar="DST", help="the folder to make; for gguf the file")],
    /,
    to: Annotated[Form, arg(help="the form to write")],
    dtype: Annotated[
        Literal["fp32", "fp16", "bf16", "f32", "f16", "q8_0"] | None, flag(metavar="fp32|fp16|bf16|q8_0")
    ] = None,
    tp: Annotated[int, arg(help="split alone: ranks of tensor parallelism, each with a file of its own")] = 1,
    shard_size: Annotated[str, arg(metavar="SIZE", help="largest safetensors file")] = "5GB",
    push: Annotated[str | None, flag("upload it to Hugging Face; a new repository is private", "OWNER/NAME")] = None,
) -> int:
    """Write a model in another program's form, bit for bit, with one tensor in memory at a time.

    huggingface is for transformers and vLLM, state-spaces for mamba-ssm; native is huggingface with checksums. split
    is Mamba-2 for Trainium, with in_proj in three. gguf is one file for llama.cpp, with its tokenizer. safetensors and
    npz are plain arrays; onnx is one step of decoding. All but onnx are read again. What the other program computes
    differently is refused, with the reason.

    For example:
      mambakit convert run model --to huggingface
      mambakit convert run model --to state-spaces --dtype fp16
      mambakit convert run model.gguf --to gguf --dtype q8_0
      mambakit convert run arrays --to npz
      mambakit convert model again --to native

    Args:
      dtype: of the weights, but for A_log, D and dt bias, which stay fp32; as they are unless set. q8_0 is for gguf
    """
    from ..checkpoint import convert as run

    run(source, target, to, dtype=dtype, tp=tp, shard_size=shard_size, push=push)
    print_line(f"written to {target}")
    return 0


def report(
    run: Annotated[Positional[tuple[Path, ...]], flag("run folders; several are drawn together", "RUN")],
    /,
    out: Annotated[Path | None, flag("the page to write; RUN/report.html of the first run unless set", "FILE")] = None,
) -> int:
    """Draw a run, or several together, as one HTML page that needs nothing else.

    For example:
      mambakit report run
      mambakit report run tuned --out both.html
    """
    from ..reporting import report as draw

    print_line(f"written to {draw(run, out)}")
    return 0


def info(
    path: Annotated[Positional[tuple[Path, ...]], flag("shard folders, checkpoints, runs and model folders", "PATH")],
    /,
    json: Json = False,
) -> int:
    """Say what a folder is: its model, its data, how far a run has come. Reads no weights; see verify.

    For example:
      mambakit info shards
      mambakit info run run/checkpoints/step_00000100 --json
    """
    from ..info import info as look

    if not path:
        raise ConfigError("there is nothing to look at; name shard folders, checkpoints, runs or model folders")
    found = {str(folder): look(folder) for folder in map(path_of, path)}
    if json:
        print_json(found)
        return 0
    for name, facts in found.items():
        print_line(f"{name}: {facts['kind']}")
        for fact, value in facts.items():
            if fact != "kind" and value is not None:
                print_line(f"  {fact.replace('_', ' '):<18} {_readable(value)}")
    return 0


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_readable(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def verify(
    path: Annotated[Positional[tuple[Path, ...]], flag("shard folders, checkpoints, runs and model folders", "PATH")],
    /,
    json: Json = False,
) -> int:
    """Read everything, compare it with its checksums, and say what is wrong.

    A model folder in another program's form has no checksums: it is opened, and its weights looked at.

    For example:
      mambakit verify shards
      mambakit verify run run/checkpoints/step_00000100 --json
    """
    from ..verify import WITH_CHECKSUMS
    from ..verify import verify as run

    if not path:
        raise ConfigError("there is nothing to verify; name shard folders, checkpoints, runs or model folders")
    problems: dict[str, list[str]] = {}
    for folder in map(path_of, path):
        try:
            problems[str(folder)] = list(run(folder))
        except UserError as error:  # the others are looked at all the same
            problems[str(folder)] = [str(error)]
    if json:
        print_json(problems)
    else:
        for name, found in problems.items():
            has_checksums = any((Path(name) / mark).exists() for mark in WITH_CHECKSUMS)
            good = "good" if has_checksums else "it opens, and its weights are finite; it has no checksums"
            print_line(f"{name}: {good if not found else '1 problem' if len(found) == 1 else f'{len(found)} problems'}")
            for problem in found:
                print_line(f"  {problem}")
    return 2 if any(problems.values()) else 0


def bench_ops(
    name: Annotated[Positional[tuple[str, ...]], flag(metavar="[NAME ...]")] = (),
    /,
    shape: Annotated[tuple[str, ...], UseAppendAction, flag(SHAPE_HELP, "B32,L2048,…")] = (),
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
    documents: Annotated[int | None, flag(metavar="INT")] = None,
    seconds: Annotated[float, arg(help="time for each measurement")] = 0.5,
    device: Device = "auto",
    json: Json = False,
) -> int:
    """Time the operators by themselves, forward and backward, beside other implementations that are installed.

    GB/s counts every input and output once, and "of copy" is that as a share of how fast the device copies memory: what
    is near 100% cannot be made faster. GFLOP/s counts the arithmetic of the formula. Peak is memory beyond the inputs.

    For example:
      mambakit bench ops --seconds 0.1
      mambakit bench ops rms_norm --seconds 0.1
      mambakit bench ops selective_scan ssd --shape B2,L256 --shape B1,L1024 --documents 4 --seconds 0.1
      mambakit bench ops causal_conv1d --shape B2,L512,D64,W4 --dtype bf16 --seconds 0.1 --json

    Args:
      name: selective_scan, causal_conv1d, rms_norm, linear_cross_entropy or ssd; all of them unless named
      dtype: of activations, as under autocast; parameters are fp32. auto: bf16 or fp16 on a GPU, fp32 on a CPU
      documents: documents in each row, for the operators that keep them apart; rows are whole unless set
    """
    from ..bench import measure_ops

    parts = measure_ops(name, shapes=shape, device=device, dtype=dtype, documents=documents, seconds=seconds)
    return _print_parts(parts, json)


def bench_train(
    model: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="PRESET[,PRESET]")],
    batch_rows: Annotated[int | None, flag(metavar="INT")] = None,
    length: Annotated[int | None, flag("tokens of a row; unless set, 2048 on a CUDA GPU, 256 elsewhere", "INT")] = None,
    steps: Annotated[int, arg(help="steps to time")] = 10,
    warmup_steps: Annotated[int, arg(help="steps before them, besides the first one of all")] = 3,
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto",
    documents: Annotated[int | None, flag("documents in each row; rows are whole unless set", "INT")] = None,
    compile: Annotated[bool, flag("torch.compile the model")] = False,
    cuda_graph: Annotated[bool, flag()] = True,
    recompute: Literal["auto", "none", "light", "mixer", "block"] = "auto",
    peers: Annotated[bool, flag("also mamba_ssm's model of the same sizes, where it is installed")] = False,
    device: Device = "auto",
    json: Json = False,
) -> int:
    """Time whole training steps of a model on random tokens: forward, loss, backward, clipping, AdamW.

    MFU is the arithmetic of the model as a share of how fast the device multiplies large matrices, which is measured
    before and after the steps, since clocks drift. Models are measured one after the other in one process.

    For example:
      mambakit bench train --model tiny --steps 2
      mambakit bench train --model mamba-130m,mamba2-130m --length 128 --steps 2 --documents 4 --peers

    Args:
      model: models by name, one after the other; may be given again
      batch_rows: rows of a step; unless set, 32 for 130m down to 4 for 2.8b on a CUDA GPU, 2 elsewhere
      precision: of the computation; weights are fp32. auto: bf16 or fp16 on a GPU, fp32 on a CPU; as train.precision
      cuda_graph: do not capture the pass as a CUDA graph on a GPU; as train.cuda_graph false
      recompute: what backward computes once more rather than keep; as train.recompute
    """
    from ..bench import measure_training

    names = [name.strip() for text in model for name in text.split(",")]
    sizes: dict[str, Any] = {"batch_rows": batch_rows, "length": length, "documents": documents, "precision": precision}
    sizes |= {"steps": steps, "warmup_steps": warmup_steps}
    way: dict[str, Any] = {"compiled": compile, "cuda_graph": cuda_graph, "recompute": recompute, "device": device}
    return _print_parts(measure_training(names, peers=peers, **sizes, **way), json)


def bench_generate(
    model: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="PRESET[,PRESET]")],
    batch_size: Annotated[tuple[int, ...], arg(metavar="INT …", help="rows that are continued together")] = (1,),
    prompt_length: Annotated[int, arg(help="tokens of each prompt")] = 100,
    new_tokens: Annotated[int, arg(help="tokens of each row that are timed")] = 100,
    dtype: Annotated[tuple[Literal["auto", "fp32", "bf16", "fp16", "int8"], ...], flag()] = ("auto",),
    rounds: Annotated[int, arg(help="how often prompts are read and continued")] = 3,
    temperature: Annotated[float, arg(help="0 takes the likeliest token")] = 0.0,
    device: Device = "auto",
    json: Json = False,
) -> int:
    """Time how fast a model of random weights reads prompts and writes tokens, beside how fast memory is read.

    For each token all weights are read once, for all rows together; the states of the rows are read and written. "Of
    memory's rate" is the bytes of weights alone as a share of what memory gives, which is measured in the same run.

    For example:
      mambakit bench generate --model tiny --new-tokens 8
      mambakit bench generate --model mamba-130m,mamba2-130m --batch-size 1 4 --dtype fp32 int8 --rounds 1

    Args:
      model: models by name, one after the other; may be given again
      dtype: of the weights, one or several; auto: bf16 or fp16 on a GPU, fp32 on a CPU
    """
    from ..bench import measure_decoding

    names = [name.strip() for text in model for name in text.split(",")]
    parts = measure_decoding(
        names, batch_sizes=batch_size, prompt_length=prompt_length, new_tokens=new_tokens, weights=dtype,
        rounds=rounds, temperature=temperature, device=device,
    )  # fmt: skip
    return _print_parts(parts, json)


def bench_data(
    shards: Annotated[Positional[Path], arg(metavar="SHARDS")],
    /,
    split: Literal["train", "val"] = "train",
    sequence_length: Annotated[int, arg(help="tokens of a row")] = 2048,
    batch_rows: Annotated[int, arg(help="rows of a batch")] = 32,
    workers: Annotated[tuple[int, ...], arg(metavar="INT …", help="threads that read ahead")] = (0, 1, 2),
    seconds: Annotated[float, arg(help="time for each measurement")] = 2.0,
    json: Json = False,
) -> int:
    """Time how fast batches are read from a folder of shards, as training reads them.

    "Of the copy" is the share of how fast the same rows are copied from the files, not unpacked. Files that were read a
    short time ago lie in memory, and are read faster than from a disk or over a network.

    For example:
      mambakit bench data shards
      mambakit bench data shards --batch-rows 8 --sequence-length 512 --workers 0 4 --seconds 0.2

    Args:
      shards: a folder that prepare wrote
      workers: one number or several; 0 reads in the thread that trains; as data.workers
    """
    from ..bench import measure_reading

    sizes: dict[str, Any] = {"sequence_length": sequence_length, "batch_rows": batch_rows}
    parts = measure_reading(path_of(shards), split=split, workers=workers, seconds=seconds, **sizes)
    return _print_parts(parts, json)


def _print_parts(parts: Iterator[ReportPart], as_json: bool) -> int:
    """Each part of a report as it comes, or all of them together as JSON."""
    if as_json:
        from ..bench import collect

        print_json(collect(parts))
    else:
        for part in parts:
            if part.text:
                print_line(part.text)
    return 0
