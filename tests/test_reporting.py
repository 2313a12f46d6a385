"""A report is one page that stands alone, shows every run, and takes whatever a run folder holds."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from array import array
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mambakit import MambaLM, ModelConfig
from mambakit.files import UserError
from mambakit.reporting import DRAWN_POINTS, Curve, RunRecord, read_run, render, report, smooth, thin
from mambakit.reporting.markup import COLORS
from mambakit.reporting.plots import MOST_DOTS, Frame, ticks

HOSTILE = "</pre><script>alert(1)</script><img src=\"x\" onerror='alert(2)'>&amp;"
CONFIG = {"model": {"kind": "mamba2", "d_model": 64}, "optim": {"lr": 3e-4, "betas": [0.9, 0.95]}}
ALL_PLOTS = {"loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_second", "memory_bytes"}


def _train(step: int, **changes: Any) -> dict[str, Any]:
    record = {
        "type": "train", "step": step, "loss": 2 + 6 / step, "bits_per_byte": 1 + 2 / step, "lr": 3e-4, "grad_norm": 1.2,
        "tokens": 4096 * step, "tokens_per_second": 4300.0, "mfu": 0.31, "memory_bytes": 3 * 2**29, "epoch": 0.01 * step,
    }  # fmt: skip
    return {**record, **changes}


def _eval(step: int, loss: float) -> dict[str, Any]:
    return {"type": "eval", "step": step, "loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / 2}


def _sample(step: int, prompt: str, text: str) -> dict[str, Any]:
    return {"type": "sample", "step": step, "prompt": prompt, "text": text}


def _write(
    folder: Path,
    records: Iterable[dict[str, Any]],
    *,
    config: Any = CONFIG,
    end: str = "",
    evaluations: Iterable[Any] = (),
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    if evaluations:
        (folder / "evaluations.jsonl").write_text("".join(json.dumps(record) + "\n" for record in evaluations))
    return folder


class Page(HTMLParser):
    """A page taken apart. Fails where an element is not closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source = text
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}  # by the element they stand in
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data

    @property
    def plots(self) -> dict[str, ElementTree.Element]:
        """The drawing of each plot; parsing fails unless it is well-formed XML."""
        found = re.findall(r'<figure id="plot-(\w+)">.*?(<svg.*</svg>)', self.source)
        return {key: ElementTree.fromstring(drawing) for key, drawing in found}

    @property
    def drawings(self) -> dict[str, dict[str, ElementTree.Element]]:
        """All drawings of each plot, by the axis they run along."""
        figures = re.findall(r'<figure id="plot-(\w+)">(.*?)</figure>', self.source, re.S)
        found = {key: re.findall(r'^.*?(<svg class="by-(\w+)".*</svg>)', content, re.M) for key, content in figures}
        return {key: {axis: ElementTree.fromstring(svg) for svg, axis in drawn} for key, drawn in found.items()}

    @property
    def data(self) -> dict[str, Any]:
        text = re.findall(r'<script type="application/json" id="data">(.*?)</script>', self.source)[0]
        value: dict[str, Any] = json.loads(text)
        return value

    def row(self, label: str) -> list[str]:
        """The cells of the first table row that begins with a label."""
        row = re.findall(rf'<th scope="row">{re.escape(label)}</th>(.*?)</tr>', self.source)[0]
        return [re.sub("<.*?>", "", cell) for cell in re.findall("<td>(.*?)</td>", row)]


def _page(*folders: Path) -> Page:
    return Page(render([read_run(folder) for folder in folders]))


def _paths(drawing: ElementTree.Element, *classes: str) -> list[str]:
    return [path.get("d", "") for path in drawing.iter("path") if set(classes) <= set(path.get("class", "").split())]


def _points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+),([-\d.]+)", path)]


def test_a_page_shows_every_plot_number_sample_and_setting_of_a_run(tmp_path: Path) -> None:
    records = [_train(step) for step in range(1, 301)]
    records += [_eval(100, 2.5), _eval(200, 2.25), _eval(300, 2.375), _sample(300, "def ", "f(x):\n    return x\n")]
    results = [
        {"model": "step 300", "loss": 2.25, "word_perplexity": 5e17, "targets": 1234567, "window": None},
        {"model": "gzip -9", "bits_per_byte": 2.125},
    ]
    evaluation = {
        "time": "2026-11-15T10:00:00Z",
        "checkpoint": "step_00000300",
        "data": "text",
        "split": "val",
        "results": results,
    }
    page = _page(_write(tmp_path / "small", records, evaluations=[evaluation]))
    assert page.plots.keys() == ALL_PLOTS
    assert page.texts["h1"] == ["mambakit report: small"]
    assert page.row("Steps") == ["300"]
    assert page.row("Tokens") == ["1.23M"]
    assert page.row("Training loss, mean of the last 20") == [
        f"{sum(2 + 6 / step for step in range(281, 301)) / 20:.4f}"
    ]
    assert page.row("Best validation loss") == ["2.2500 at step 200"]
    assert page.row("Bits per byte, validation") == ["1.1250 at step 200"]
    assert page.row("Tokens per second, median") == ["4.30k"]
    assert page.row("Peak memory") == ["1.50 GiB"]
    assert set(page.data["plots"]["memory_bytes"][0]["values"]) == {1.5}
    assert page.texts["pre"] == ["def f(x):\n    return x\n"]
    assert page.row("step 300") == ["whole", "2.2500", "–", "5.000e+17", "–", "1,234,567", "–", "–"]
    assert page.row("gzip -9") == ["–", "–", "–", "–", "2.1250", "–", "–", "–"]
    assert "step_00000300 · text · val · 2026-11-15T10:00:00Z" in page.source
    assert page.row("d_model") == ["64"]
    assert page.row("betas") == ["[0.9, 0.95]"]


def test_a_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = _page(_write(tmp_path / "run", [_train(1), _train(2), _eval(2, 4.0), _sample(2, "a", "b")]))
    assert "http://" not in page.source and "https://" not in page.source and "@import" not in page.source
    assert not {"link", "img", "iframe", "object", "use", "image"} & set(page.tags)
    assert not {"src", "href", "xlink:href"} & {name for name, _ in page.attributes}
    assert "default-src 'none'" in page.source


def test_two_runs_lie_over_each_other_in_their_own_colours(tmp_path: Path) -> None:
    first = _write(tmp_path / "slow", [*map(_train, range(1, 201)), _eval(100, 3.0), _eval(200, 2.5)])
    faster = {"model": CONFIG["model"], "optim": {"lr": 1e-3, "betas": [0.9, 0.95], "clip": 1.0}}
    second = _write(tmp_path / "fast", [_train(step, loss=1 + 6 / step) for step in range(1, 201)], config=faster)
    page = _page(first, second)
    for key, drawing in page.plots.items():
        assert len(_paths(drawing, "line", "c0")) == len(_paths(drawing, "line", "c1")) == 1, key
    assert len(_paths(page.plots["loss"], "validation", "c0")) == 1
    assert not _paths(page.plots["loss"], "validation", "c1")
    assert len([c for c in page.plots["loss"].iter("circle") if "c0" in c.get("class", "")]) == 2
    slow, fast = (_points(_paths(page.plots["loss"], "line", color)[0])[-1] for color in ("c0", "c1"))
    assert slow[0] == fast[0] and slow[1] < fast[1]  # y grows downwards
    assert [series["name"] for series in page.data["plots"]["loss"]] == [
        "slow training",
        "fast training",
        "slow validation",
    ]
    assert re.findall(r'<p class="legend">(.*?)</p>', page.source)[0].count('class="key"') == 2
    assert page.row("≠ lr") == ["0.0003", "0.001"]
    assert page.row("≠ clip") == ["–", "1.0"]
    assert page.row("d_model") == ["64", "64"]
    assert page.source.count('<tr class="differs">') == 2


def test_a_single_run_has_no_legend_and_no_marks(tmp_path: Path) -> None:
    page = _page(_write(tmp_path / "run", [_train(1)]))
    assert '<p class="legend">' not in page.source and "≠" not in page.source


def test_many_runs_stay_apart_by_dashes_when_colours_repeat(tmp_path: Path) -> None:
    folders = [_write(tmp_path / f"run{i}", [_train(1), _train(2)]) for i in range(COLORS + 1)]
    drawing = _page(*folders).plots["lr"]
    assert len(_paths(drawing, "c0")) == 2
    assert len(_paths(drawing, "c0", "dashed")) == 1


def test_hostile_text_shows_as_text_wherever_it_stands(tmp_path: Path) -> None:
    evaluation = {"checkpoint": HOSTILE, "data": HOSTILE, "results": [{"model": HOSTILE, "loss": HOSTILE}]}
    config = {HOSTILE: {HOSTILE: HOSTILE}, "model": HOSTILE}
    folder = _write(
        tmp_path / "run", [_train(1), _sample(1, HOSTILE, HOSTILE)], config=config, evaluations=[evaluation]
    )
    run = read_run(folder)
    hostile = RunRecord(HOSTILE, run.config, run.train, run.evals, run.samples, run.evaluations, unreadable_lines=1)
    page = Page(render([hostile, hostile]))
    assert page.tags.count("script") == 2 and "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.texts["pre"] == [HOSTILE + HOSTILE] * 2
    assert page.texts["title"] == [f"mambakit report: {HOSTILE}, {HOSTILE}"]
    assert "alert(1)" not in page.texts["script"][1]
    assert "<" not in page.texts["script"][0]
    assert page.data["plots"]["loss"][0]["name"] == HOSTILE
    assert page.plots.keys() == ALL_PLOTS


def test_a_sample_is_its_prompt_and_what_follows_to_the_newline(tmp_path: Path) -> None:
    page = _page(
        _write(tmp_path / "run", [_train(1), _sample(1, "", "\na"), _sample(1, "b", "bc"), _sample(1, "d", "e")])
    )
    assert page.texts["pre"] == ["\na", "bbc", "de"]
    assert "<pre><b></b>\na</pre>" in page.source  # a newline right after <pre> would be dropped
    assert "<pre><b>b</b>bc</pre>" in page.source


def test_characters_that_a_page_cannot_hold_are_replaced(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", [_train(1), _sample(1, "a\x00", "\x1b[0m\ttab \ud800 end")])
    report([folder], tmp_path / "report.html")
    assert "a\ufffd</b>\ufffd[0m\ttab ? end</pre>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_earlier_samples_are_folded_away(tmp_path: Path) -> None:
    records = [_train(1), _sample(1, "", "old"), _train(2), _sample(2, "", "new"), _sample(2, "", "newer")]
    page = _page(_write(tmp_path / "run", records))
    assert page.texts["pre"] == ["new", "newer", "old"]
    assert page.texts["details"][0].startswith("Earlier samples (1)") and "new" not in page.texts["details"][0]


@pytest.mark.parametrize("end", ['{"type":"tra', '{"type":"tra\n', '{"type":"train","step":4} \xff', "17", "{}garbage"])
def test_a_half_written_last_line_is_ignored(end: str, tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", [_train(1), _train(2)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(end.encode("latin-1"))
    run = read_run(folder)
    assert list(run.train["step"]) == [1, 2]
    assert run.unreadable_lines == 0


def test_a_broken_line_in_the_middle_is_left_out_and_told(tmp_path: Path) -> None:
    folder = _write(
        tmp_path / "run", [_train(1)], end=f'{{"type":"train","st\n{json.dumps(_train(2))}\n{{"type":"eval"}}\n'
    )
    run = read_run(folder)
    assert list(run.train["step"]) == [1, 2]
    assert run.unreadable_lines == 2
    assert "cannot be read: 2 lines" in render([run])


def test_a_resumed_run_replaces_the_steps_it_does_again(tmp_path: Path) -> None:
    first = [_train(1), _train(2), _eval(2, 5.0), _train(3), _train(4), _eval(4, 1.0), _sample(4, "", "lost")]
    run = read_run(_write(tmp_path / "run", [*first, _train(3, loss=7.0)]))
    assert list(run.train["step"]) == [1, 2, 3]
    assert run.train["loss"][2] == 7.0
    assert list(run.evals["step"]) == [2] and not run.samples
    run = read_run(_write(tmp_path / "evaluated again", [*first, _eval(4, 1.5)]))
    assert list(run.evals["step"]) == [2, 4] and list(run.evals["loss"]) == [5.0, 1.5]


def test_an_evaluation_written_before_its_step_stays(tmp_path: Path) -> None:
    run = read_run(_write(tmp_path / "run", [_eval(0, 9.0), _train(1), _eval(2, 5.0), _train(2), _train(3)]))
    assert list(run.evals["step"]) == [0, 2]


def test_what_is_no_number_leaves_a_gap(tmp_path: Path) -> None:
    bad = [None, math.nan, math.inf, "high", True, 10**400]
    records = [_train(step) for step in (1, 2, 3)]
    records += [_train(4 + i, loss=value, lr=value, memory_bytes=value) for i, value in enumerate(bad)]
    records += [_train(step) for step in (11, 12)] + [_train(13, loss=None), _train(14), _train(15, loss=None)]
    page = _page(_write(tmp_path / "run", records))
    (path,) = _paths(page.plots["loss"], "line")
    assert [len(_points(piece)) for piece in path.split("M")[1:]] == [3, 2, 1]
    assert len(list(page.plots["loss"].iter("circle"))) == 1  # the point that stands alone
    assert len(page.data["plots"]["loss"][0]["steps"]) == 6
    assert "no finite number at 8 of 14 steps, first at step 4" in page.source
    assert not re.search(r"\bnan\b", page.source, re.I)


def test_a_run_of_one_step_is_a_dot(tmp_path: Path) -> None:
    page = _page(_write(tmp_path / "run", [_train(1)]))
    assert page.plots.keys() == ALL_PLOTS
    for drawing in page.plots.values():
        (dot,) = drawing.iter("circle")
        assert 0 < float(dot.get("cx", "")) <= Frame.WIDTH
        assert 0 < float(dot.get("cy", "")) < Frame.HEIGHT


@pytest.mark.parametrize("records", [[], [_eval(0, 9.0)], [_train(1, loss=None, lr=None, memory_bytes=None)]])
def test_a_run_with_little_recorded_still_renders(records: list[dict[str, Any]], tmp_path: Path) -> None:
    page = _page(_write(tmp_path / "run", records, config={}))
    assert "Nothing is recorded yet." in page.source
    assert ("no step is recorded yet" in page.source) == (not records or records[0]["type"] == "eval")


def test_bits_per_byte_has_no_plot_when_it_is_not_known(tmp_path: Path) -> None:
    page = _page(_write(tmp_path / "run", [_train(1, bits_per_byte=None), _train(2, bits_per_byte=None)]))
    assert page.plots.keys() == ALL_PLOTS - {"bits_per_byte"} and "plot-bits_per_byte" not in page.source
    assert page.row("Bits per byte, validation") == ["–"]


def _curve(values: Iterable[float]) -> Curve:
    column = array("d", values)
    return Curve(0, range(1, len(column) + 1), column)


def test_thinning_keeps_spikes_gaps_and_order() -> None:
    values = [2 + 0.1 * math.sin(i) for i in range(123_457)]
    values[54_321], values[98_765] = 40.0, -3.0
    values[20_000:21_000] = [math.nan] * 1000
    thinned = thin(_curve(values))
    assert len(thinned.steps) <= DRAWN_POINTS
    points = dict(zip(thinned.steps, thinned.values, strict=True))
    assert points[54_322] == 40.0 and points[98_766] == -3.0
    assert any(math.isnan(value) for value in thinned.values)
    assert list(thinned.steps) == sorted(points)
    assert thinned.steps[0] < 250 and thinned.steps[-1] > 123_457 - 250


def test_a_short_curve_is_not_thinned() -> None:
    curve = _curve(float(i % 7) for i in range(DRAWN_POINTS))
    assert thin(curve) == curve


def test_every_curve_of_a_long_run_is_thinned(tmp_path: Path) -> None:
    spike = 4567
    page = _page(
        _write(
            tmp_path / "run",
            [_train(step, grad_norm=9.0 if step == spike else 1.0 + step % 3) for step in range(1, 8001)],
        )
    )
    for key, drawing in page.plots.items():
        assert all(len(_points(path)) <= DRAWN_POINTS for path in _paths(drawing, "run")), key
        assert all(len(series["steps"]) <= DRAWN_POINTS for series in page.data["plots"][key]), key
    (norms,) = page.data["plots"]["grad_norm"]
    assert dict(zip(norms["steps"], norms["values"], strict=True))[spike] == 9.0


def test_smoothing_follows_the_curve_and_not_its_spikes() -> None:
    values = [5.0 + (i % 2) * 0.2 for i in range(1000)]
    values[499] = values[500] = 1000.0
    smoothed = smooth(_curve(values))
    assert all(5.0 <= value <= 5.2 for value in smoothed.values)
    assert (smoothed.steps[0], smoothed.steps[-1]) == (1, 1000)
    line = smooth(_curve(float(i) for i in range(1000)))
    assert line.values[0] == 0 and line.values[200] == pytest.approx(line.steps[200] - 1)  # no lag


def test_smoothing_does_not_bridge_a_gap() -> None:
    smoothed = smooth(_curve(math.nan if 400 <= i < 420 else 1.0 for i in range(1000)))
    assert all(
        math.isnan(value) == (400 < step <= 420) for step, value in zip(smoothed.steps, smoothed.values, strict=True)
    )


def test_first_steps_and_spikes_do_not_flatten_the_loss(tmp_path: Path) -> None:
    def loss(step: int) -> float:
        return 500.0 if step in (1, 2, 1500) else 3 + 1 / step

    page = _page(_write(tmp_path / "run", [_train(step, loss=loss(step)) for step in range(1, 3001)]))
    (bold,) = _paths(page.plots["loss"], "line")
    late = [y for x, y in _points(bold) if x > 20]
    assert max(late) - min(late) > 0.1 * Frame.HEIGHT
    assert "The axis is cut: the highest value is 500, at step 1,500." in page.source


def test_validation_far_above_training_is_not_cut_off(tmp_path: Path) -> None:
    records = [_train(step, loss=1.0 + 0.01 * (step % 5)) for step in range(1, 201)]
    page = _page(_write(tmp_path / "run", [*records, _eval(100, 3.0), _eval(200, 6.0)]))
    dots = [float(dot.get("cy", "")) for dot in page.plots["loss"].iter("circle")]
    assert len(dots) == 2 and all(0 < y < Frame.HEIGHT for y in dots)
    assert "The axis is cut" not in page.source


def test_dots_of_many_evaluations_do_not_run_together(tmp_path: Path) -> None:
    page = _page(_write(tmp_path / "run", [_train(1), _train(2), *(_eval(step, 3.0) for step in range(1, 302))]))
    dots = [float(dot.get("cx", "")) for dot in page.plots["loss"].iter("circle")]
    assert 25 <= len(dots) <= MOST_DOTS
    (path,) = _paths(page.plots["loss"], "validation")
    assert len(_points(path)) == 301 and max(dots) == _points(path)[-1][0]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 3045, ["0", "500", "1000", "1500", "2000", "2500", "3000"]),
        (0, 152_000, ["0", "50k", "100k", "150k"]),
        (0, 3.1e-4, ["0", "0.5e-4", "1.0e-4", "1.5e-4", "2.0e-4", "2.5e-4", "3.0e-4"]),
        (0, 2.5e9, ["0", "0.5G", "1.0G", "1.5G", "2.0G", "2.5G"]),
        (1.93, 3.02, ["2.0", "2.2", "2.4", "2.6", "2.8", "3.0"]),
        (-1, 1, ["-1.0", "-0.5", "0", "0.5", "1.0"]),
        (0, 1.015, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks_are_round(low: float, high: float, labels: list[str]) -> None:
    assert [label for _, label in ticks(low, high)] == labels


def test_steps_are_counted_in_whole_numbers() -> None:
    assert [label for _, label in ticks(0, 1.015, least=1)] == ["0", "1"]
    assert [label for _, label in ticks(0, 3.045, least=1)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("value", [0.0, 1e-300, 3.0, -2.0, 1e99])
def test_a_constant_curve_has_an_axis(value: float, tmp_path: Path) -> None:
    page = _page(_write(tmp_path / "run", [_train(step, loss=value, lr=value) for step in range(1, 31)]))
    for key in ("loss", "lr"):
        (path,) = _paths(page.plots[key], "line")
        assert all(0 <= y <= Frame.HEIGHT for _, y in _points(path))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", [_train(1)])
    (folder / "config.json").unlink()
    assert "settings are not shown" in read_run(folder).config_problem  # as where it is damaged
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"run holds no metrics\.jsonl; give a run folder, as made by mambakit train"):
        read_run(folder)


def test_wrong_arguments_are_refused_with_advice(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", [_train(1)])
    with pytest.raises(ValueError, match="nothing is not a folder; give a run folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match="there is nothing to draw; name a run folder"):
        report([])
    with pytest.raises(ValueError, match="run is a folder; name a file for the report, such as .*report.html"):
        report([folder], folder)
    with pytest.raises(UserError, match="config.json/report.html cannot be written: .*; name another place with --out"):
        report([folder], folder / "config.json" / "report.html")


@pytest.mark.parametrize(
    ("config", "problem"), [("", "is not valid JSON"), ("{", "is not valid JSON"), ("[1]", "holds a list")]
)
def test_a_broken_config_beside_good_metrics_is_a_warning(config: str, problem: str, tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", [_train(1), _train(2)])
    (folder / "config.json").write_text(config)
    page = _page(folder)
    assert page.plots.keys() == ALL_PLOTS and page.row("Steps") == ["2"] and page.row("Parameters") == ["–"]
    (warning,) = re.findall('<p class="warning">(.*?)</p>', page.source)
    assert "parameters and settings are not shown" in warning and problem in warning


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    folders = [_write(tmp_path / parent / "run", [_train(1)]) for parent in ("a", "b")]
    report(folders, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.texts["h1"] == [f"mambakit report: {folders[0]}, {folders[1]}"]


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = _write(tmp_path / "run", [_train(1)]), tmp_path / "new" / "report.html"
    report([folder], out)
    before = out.read_bytes()
    assert before.startswith(b"<!doctype html>") and before.endswith(b"</html>\n")

    def fail(source: Path, target: Path) -> None:
        assert Path(source).read_bytes().endswith(b"</html>\n") and target == out
        raise OSError("disk full")

    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(_train(2)) + "\n")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report([folder], out)
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    assert out.read_bytes() == before


def test_reports_need_no_torch() -> None:
    code = "import sys, mambakit.reporting; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


MODEL = {"kind": "mamba2", "d_model": 64, "num_layers": 2, "head_dim": 16, "vocab_size": 500}
HISTORY = [
    {"step": 0, "time": "2026-11-16T01:02:03Z", "device": "NVIDIA H200", "dtype": "bfloat16", "versions": {"mambakit": "0.1.0", "torch": "2.13.0"}, "changed": []},
    {"step": 2, "time": "2026-11-16T02:00:00Z", "device": "NVIDIA H200", "dtype": "bfloat16", "versions": {"mambakit": "0.1.0", "torch": "2.13.0"}},
    {"step": 4, "time": "2026-11-16T03:00:00Z", "device": "cpu", "changed": ["optim.lr: 0.001 -> 0.0005", "train.steps: 4 -> 9"]},
]  # fmt: skip


def _with_history(folder: Path, history: Iterable[Any], end: str = "") -> Path:
    (folder / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history) + end)
    return folder


def _x_of(drawing: ElementTree.Element, *classes: str) -> list[float]:
    (path,) = _paths(drawing, *classes)
    return [x for x, _ in _points(path)]


def test_the_head_has_parameters_time_and_device(tmp_path: Path) -> None:
    records = [
        _train(1, tokens_per_second=409.6),
        _train(2, tokens_per_second=4096.0),
        _train(3, tokens_per_second=100.0),
    ]
    ours = _with_history(_write(tmp_path / "ours", records, config={"model": MODEL}), HISTORY)
    foreign = _write(tmp_path / "foreign", [_train(1, tokens_per_second=None)], config={"model": {"layers": 7}})
    page = _page(ours, foreign)
    count = sum(parameter.numel() for parameter in MambaLM(ModelConfig(**MODEL)).parameters())
    assert page.row("Parameters") == [f"{count / 1000:.0f}k", "–"]
    assert page.row("Training time") == ["52 s", "–"]  # 10 + 1 + 40.96
    assert page.row("Device") == ["NVIDIA H200 (bfloat16)then cpu", "–"]
    assert page.row("Versions") == ["mambakit 0.1.0, torch 2.13.0", "–"]


def test_time_goes_on_over_gaps_and_lost_records(tmp_path: Path) -> None:
    records = [_train(step, tokens_per_second=4096.0) for step in (11, 12, 14)]  # the first ten are lost
    records += [
        _train(15, tokens=None, tokens_per_second=4096.0),
        _train(16, tokens_per_second=None),
        _train(17, tokens_per_second=4096.0),
    ]
    run = read_run(_write(tmp_path / "run", records))
    assert list(run.seconds) == pytest.approx([1, 2, 4, 4, 4, 5])


def test_curves_can_be_seen_along_tokens_and_time(tmp_path: Path) -> None:
    """Half of the steps take three times as long: the same curve, but stretched."""
    records = [_train(step, tokens_per_second=4096.0 if step <= 50 else 4096.0 / 3) for step in range(1, 101)]
    page = _page(_write(tmp_path / "run", [*records[:50], _eval(50, 2.5), *records[50:], _eval(100, 2.25)]))
    drawings = page.drawings["lr"]
    assert list(drawings) == ["step", "tokens", "time"]
    ends = Frame.WIDTH / 1.015
    assert _x_of(drawings["step"], "line")[49] == pytest.approx(ends / 2, abs=0.1)
    assert _x_of(drawings["tokens"], "line") == _x_of(drawings["step"], "line")
    times = _x_of(drawings["time"], "line")
    assert times[49] == pytest.approx(ends / 4, abs=0.1) and times[-1] == pytest.approx(ends, abs=0.1)
    assert [float(dot.get("cx", "")) for dot in page.drawings["loss"]["time"].iter("circle")] == pytest.approx(
        [ends, ends / 4], abs=0.1
    )
    labels = {
        axis: [text.text for text in drawing.iter("text") if text.get("class") == "x"]
        for axis, drawing in drawings.items()
    }
    assert labels["step"][-1] == "step" and labels["tokens"][-1] == "tokens"
    assert labels["time"] == ["0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0", "training time, minutes"]
    series = page.data["plots"]["loss"][0]
    assert series["tokens"][49] == 50 * 4096 and series["time"][49] == pytest.approx(50) and series["time"][-1] == 200
    assert page.data["view"]["last"]["time"] == pytest.approx(200 * 1.015)


def test_the_choice_of_an_axis_needs_no_script(tmp_path: Path) -> None:
    page = _page(_write(tmp_path / "run", [_train(1), _train(2)]))
    assert re.findall(r'<label><input type="radio" name="axis" id="by-(\w+)"( checked)?/>(\w+)</label>', page.source) == [
        ("step", " checked", "step"), ("tokens", "", "tokens"), ("time", "", "time")
    ]  # fmt: skip
    assert "svg.by-tokens, svg.by-time { display: none; }" in page.source
    for axis in ("tokens", "time"):
        assert f"main:has(#by-{axis}:checked) svg.by-{axis}" in page.source


def test_axes_that_no_run_knows_are_not_offered(tmp_path: Path) -> None:
    old = _write(tmp_path / "old", [_train(step, tokens=None, tokens_per_second=None) for step in (1, 2)])
    page = _page(old)
    assert "radio" not in page.tags and 'type="radio"' not in page.source and list(page.drawings["loss"]) == ["step"]
    page = _page(old, _write(tmp_path / "new", [_train(1), _train(2)]))
    assert list(page.drawings["loss"]) == ["step", "tokens", "time"]
    assert _paths(page.drawings["loss"]["time"], "c0", "line") == [""]
    assert len(_points(_paths(page.drawings["loss"]["time"], "c1", "line")[0])) == 2
    assert page.data["plots"]["loss"][0]["time"] == [None, None]


def test_changed_settings_are_listed(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", [_train(step) for step in range(1, 10)])
    page = _page(_with_history(folder, HISTORY))
    assert page.texts["h2"][0] == "Changes"
    assert page.row("4") == ["2026-11-16T03:00:00Z", "optim.lr: 0.001 -&gt; 0.0005train.steps: 4 -&gt; 9"]
    assert "Changes" not in _page(_with_history(folder, HISTORY[:2])).texts["h2"]
    (folder / "history.jsonl").unlink()
    assert "Changes" not in _page(folder).texts["h2"]


def test_where_a_run_went_back_is_listed(tmp_path: Path) -> None:
    rollback = {"type": "rollback", "step": 2, "from_step": 5, "reason": "the loss is not finite", "rows": [24, 40]}
    page = _page(_write(tmp_path / "run", [_train(1), _train(2), rollback, _train(3)]))
    what = "went back to here from step 5: the loss is not finite; rows left out: [24, 40]"
    assert page.row("2") == ["–", what]


def test_a_run_that_went_back_forgets_what_was_changed_after(tmp_path: Path) -> None:
    again = {"step": 3, "device": "NVIDIA A100", "changed": ["optim.lr: 0.001 -> 0.01"]}
    page = _page(_with_history(_write(tmp_path / "run", [_train(1)]), [*HISTORY, again]))
    assert page.row("Device") == ["NVIDIA H200 (bfloat16)then NVIDIA A100"]
    assert "0.0005" not in page.source and "0.01" in page.source


def test_a_history_of_any_kind_is_taken(tmp_path: Path) -> None:
    odd = [
        {}, {"step": "two"}, {"step": 1}, {"step": 1, "device": 7, "dtype": ["a", "b"], "versions": "new", "changed": "one line"},
        {"step": 2, "device": HOSTILE, "versions": {HOSTILE: HOSTILE}, "changed": [HOSTILE, 3, None]},
    ]  # fmt: skip
    folder = _with_history(_write(tmp_path / "run", [_train(1)]), odd, end='{"step": 3, "dev')
    page = _page(folder)
    assert page.tags.count("script") == 2 and "img" not in page.tags
    assert page.row("1")[1] == "one line" and page.row("Device")[0].startswith("7 (a b)then")


def test_figures_of_tasks_are_shown_with_their_errors(tmp_path: Path) -> None:
    figure = {"task": "lambada", "metric": "acc", "num_fewshot": 0, "samples": 5153, "higher_is_better": True}
    results = [
        {**figure, "model": "a", "value": 0.25, "stderr": 0.006},
        {**figure, "model": HOSTILE, "value": 0.5, "stderr": None},
        {"model": "a", "task": HOSTILE, "metric": "perplexity", "value": "high", "higher_is_better": []},
    ]
    told = {"models": ["a", HOSTILE], "tasks": ["lambada"], "limit": 7, "results": results, "time": "now"}
    page = _page(_write(tmp_path / "run", [_train(1)], evaluations=[told, {"tasks": 3, "models": None, "results": 1}]))
    for part in ("0.2500 ± 0.0060", "<td>0.5000</td>", "acc ↑", "5,153", "the first 7 questions"):
        assert part in page.source
    assert HOSTILE not in page.source


def test_samples_of_an_evaluation_are_shown(tmp_path: Path) -> None:
    good = {"checkpoint": "c", "results": [], "samples": [{"prompt": "def ", "text": "f():"}, "odd", {"text": HOSTILE}]}
    page = _page(_write(tmp_path / "run", [_train(1)], evaluations=[good, {"samples": 3}]))
    assert "<pre><b>def </b>f():</pre>" in page.source and page.texts["pre"] == ["def f():", HOSTILE]


def _bins(*perplexities: float) -> list[dict[str, Any]]:
    edges = [0, 64, 128, 256, 512][: len(perplexities) + 1]
    return [
        {"begin": begin, "end": end, "targets": 10, "loss": math.log(value), "perplexity": value}
        for begin, end, value in zip(edges, edges[1:], perplexities, strict=False)
    ]


def test_perplexity_by_position_is_drawn_and_listed(tmp_path: Path) -> None:
    run = _write(tmp_path / "long", [_train(1)])
    measured = {
        "trained_length": 64,
        "source": HOSTILE,
        "before": _bins(7.9, 16.7, 28.6),
        "after": _bins(5.3, 4.9, 4.8),
    }
    (run / "positions.json").write_text(json.dumps(measured))
    page = render([read_run(run), read_run(_write(tmp_path / "plain", [_train(1)]))])
    drawing = re.search(r'<figure id="positions">(<svg.*</svg>)', page)
    assert drawing is not None and HOSTILE not in page
    heights = {
        kind: [float(dot.get("cy", "nan")) for dot in ElementTree.fromstring(drawing[1]).iter("circle") if kind in dot.get("class", "")]
        for kind in ("raw", "line")
    }  # fmt: skip
    assert heights["raw"] == sorted(heights["raw"], reverse=True) and len(heights["raw"]) == 3, "y grows downwards"
    assert max(heights["raw"]) < min(heights["line"])
    assert "<td>28.6000</td><td>4.8000</td>" in page
    assert "Perplexity by position" not in render([read_run(tmp_path / "plain")])


@pytest.mark.parametrize("text", ["{", "[]", '{"before": 7}', '{"before": [{"begin": "a"}, 3], "after": [{}]}'])
def test_a_broken_measurement_is_left_out(text: str, tmp_path: Path) -> None:
    run = _write(tmp_path / "long", [_train(1)])
    (run / "positions.json").write_text(text)
    assert "Perplexity by position" not in render([read_run(run)])
