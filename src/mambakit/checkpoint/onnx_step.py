"""One step of decoding as an ONNX graph, made by torch's exporter: token and states in, logits and states out.

Inputs are `token` (batch) and, for each layer, `layers.I.conv` and `layers.I.ssm`, zeros before any text. Outputs are
`logits` (batch, vocabulary) and the same names with `next.` before them, which are the inputs of the next step.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..files import new_folder, pip_command
from ..model import MambaLM
from .files import CheckpointError, Contents, tokenizer_files
from .fitting import build_model
from .huggingface import settings_of
from .opened import OpenModel, WriteOptions

MODEL_TYPE = "mambakit_onnx"
GRAPH = "step.onnx"
ROWS = 2  # of the example batch; torch.export takes a dimension of one entry for a constant


def is_onnx(values: Mapping[str, Any]) -> bool:
    return values.get("model_type") == MODEL_TYPE


class _Step(nn.Module):
    def __init__(self, model: MambaLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        logits, following = self.model.step(token, self.model.state_of(state))
        return logits, *following.tensors()


def write_folder(model: OpenModel, folder: Path, options: WriteOptions) -> None:
    """The graph with its weights, which are all in memory meanwhile; those of a large model are in a file beside it."""
    try:
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError:
        raise CheckpointError(f"--to onnx needs the package onnxscript: {pip_command('onnx')}") from None
    with new_folder(folder, CheckpointError) as beside:
        network = build_model(model, folder).eval()
        state = network.initial_state(ROWS)
        names = [f"layers.{number}.{name}" for number, layer in enumerate(state.layers) for name in layer]
        given = (torch.zeros(ROWS, dtype=torch.int64), *state.tensors())
        rows = torch.export.Dim("batch")
        with ops.backend("reference"), torch.no_grad(), _quiet():
            program = torch.onnx.export(
                _Step(network),
                given,
                dynamo=True,
                input_names=["token", *names],
                output_names=["logits", *(f"next.{name}" for name in names)],
                dynamic_shapes=({0: rows}, tuple({0: rows} for _ in names)),
                verbose=False,
            )
        assert program is not None
        program.save(beside / GRAPH)
        about = {
            "model_type": MODEL_TYPE,
            "eos_token_id": list(model.end_tokens) or None,
            "states": {name: list(tensor.shape[1:]) for name, tensor in zip(names, state.tensors(), strict=True)},
            "mambakit": settings_of(model.config),
        }
        files = tokenizer_files(model.tokenizer, model.end_tokens)
        (files | Contents({"config.json": about}, options.beside, {})).write_into(beside)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's words about packages that it can do without."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
