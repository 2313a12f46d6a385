"""What a training step takes of a GPU's memory, by part: an account of the tensors that are there at its peak.

A pass is at its peak when its backward half begins, with everything kept that backward needs. Gradients come while what
was kept goes, so the first pass of a step needs room for one of them, and later passes, which add to gradients, for
both. What blocks keep follows from the operators of model/ and ops/ (`tests/test_memory.py` compares with peaks that
were measured on a GPU).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import Mamba1Dims, Mamba2Dims, ModelConfig, Recompute, RunConfig
from ..model.recompute import BLOCKS_FOR_A_SUM
from ..ops.gpu.device import is_roomy
from ..ops.gpu.sizes import LOGITS_AT_ONCE, LONG_CHUNK, SHORT_CHUNK, STEPS_FOR_A_STATE, STEPS_WITH_LITTLE_ROOM
from ..parallel import Mesh
from .held import FP32, Held, largest

NARROW, IN_FP8 = 2, 1  # bytes of a number in bf16 or fp16, and of one in eight bits
MUON_AT_ONCE, MUON_BYTES = 2**25, 16  # numbers that Muon iterates together, and bytes that each takes meanwhile
WORKSPACE = 100e6  # cuBLAS, and small tensors
FRAGMENTS = 0.02  # of all, lost between blocks of memory


@dataclass(frozen=True)
class Gpu:
    """What the account depends on."""

    size: int = NARROW  # bytes of a number of an activation
    is_roomy: bool = True  # shared memory as on an A100 or H100; cards up to 48 GB have less, and kernels keep more

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> Gpu:
        return cls(dtype.itemsize, is_roomy(device))


ROOMY = Gpu()


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a step, without the CUDA context."""

    held: Held
    copies: float  # of the weights in the dtype of matrix products, made in each pass
    kept: float  # by the blocks for backward
    loss: float  # logits, or the gradients around the last block, whichever is more
    is_added_to: bool  # gradients of earlier micro-batches are there
    stepping: float  # of the optimizer's step; captured passes keep their memory meanwhile

    @property
    def weights(self) -> float:
        return self.held.parameters + self.copies

    @property
    def workspace(self) -> float:
        return WORKSPACE + self.stepping + FRAGMENTS * (self.held.on_device + self.copies + self.kept + self.loss)

    @property
    def gradients(self) -> float:
        """Beyond the room that what was kept leaves them."""
        whole = max(self.held.gradients, self.held.summed_later)
        return whole if self.is_added_to else max(0.0, whole - self.kept - self.loss)

    @property
    def total(self) -> float:
        on_device = self.held.on_device - max(self.held.gradients, self.held.summed_later)
        return on_device + self.copies + self.gradients + self.kept + self.loss + self.workspace

    def to_json(self) -> dict[str, float]:
        parts = {name: getattr(self, name) for name in ("weights", "gradients", "kept", "loss", "workspace")}
        return {**parts, "optimizer": self.held.optimizer, "in_the_cpu": self.held.offloaded, "total": self.total}


@dataclass(frozen=True)
class Widths:
    """Numbers of a token that a block makes, of the dtype of activations, by what becomes of them."""

    projected: int  # in_proj's output
    made: int  # kept by `none` and `light`, beside out_proj's input
    again: int  # made again by `light` at little cost
    input_made_again: bool  # whether `light` makes out_proj's input again
    fp32: float  # states
    passing: float  # gradients and scratch of backward


def widths(model: ModelConfig, gpu: Gpu) -> Widths:
    dims = model.dims
    inner, projected = dims.d_inner, sum(dims.segments.values())
    if isinstance(dims, Mamba1Dims):
        selected = dims.dt_rank + 2 * dims.state_size
        states = inner * dims.state_size / (STEPS_FOR_A_STATE if gpu.is_roomy else STEPS_WITH_LITTLE_ROOM)
        return Widths(  # made: the outputs of convolution and x_proj; again: dt
            projected, made=inner + selected, again=inner, input_made_again=False, fp32=states,
            passing=projected + 3 * inner,
        )  # fmt: skip
    assert isinstance(dims, Mamba2Dims)
    chunk = LONG_CHUNK if gpu.is_roomy else SHORT_CHUNK
    scratch = 2 * inner * dims.state_size / chunk + 2 * 12 * dims.num_heads  # two states, and decays in fp32
    return Widths(  # made: the outputs of convolution and scan
        projected, made=dims.conv_channels + inner, again=0, input_made_again=True, fp32=0.0,
        passing=projected + dims.conv_channels + 2 * inner + scratch,
    )  # fmt: skip


def kept_bytes(model: ModelConfig, recompute: Recompute, length: int, gpu: Gpu, *, in_fp8: bool = False) -> float:
    """That a block keeps of a token."""
    found, d, inner, size = widths(model, gpu), model.d_model, model.dims.d_inner, gpu.size
    wide = FP32 if model.residual_in_fp32 else size
    final = sum(_numbers(shape) for shape in model.dims.state_shapes().values()) * FP32 / length
    if recompute == "block":
        return size * d + wide * d + final
    if recompute == "mixer":
        stream = (wide + (BLOCKS_FOR_A_SUM - 1) * size) * d / BLOCKS_FOR_A_SUM if size < wide else wide * d
        return size * found.projected + stream + final + (IN_FP8 * d if in_fp8 else 0)
    kept = wide * d + size * (found.projected + found.made) + FP32 * found.fp32 + final
    if recompute == "none":
        kept += size * found.again
    if in_fp8:  # the inputs of in_proj and out_proj, rounded, which are not made again
        return kept + IN_FP8 * (d + inner)
    if recompute == "none" or not found.input_made_again:
        kept += size * inner
    is_norm_kept = recompute == "none" or wide < FP32  # a narrow sum was rounded, and gives no norm again
    return kept + (size * d if is_norm_kept else 0)


def memory(config: RunConfig, mesh: Mesh, rows: int, recompute: Recompute, gpu: Gpu = ROOMY) -> Memory:
    """Of micro-batches of so many rows."""
    model, every, size = config.model, config.train.recompute_every, gpu.size
    length = config.data.sequence_length // mesh.cp
    tokens, d, vocabulary = rows * length, model.d_model, model.padded_vocab_size
    in_fp8 = config.train.precision == "fp8"
    most, own, other = (kept_bytes(model, way, length, gpu, in_fp8=in_fp8) for way in ("none", recompute, "light"))
    recomputed = -(-model.num_layers // every)
    kept = tokens * (recomputed * own + (model.num_layers - recomputed) * other)
    found = widths(model, gpu)
    train = config.train.model_copy(update={"micro_batch_rows": rows})
    held = largest(config.model_copy(update={"train": train}), mesh)
    # The last norm's output and sum, their gradients, and the head's: there from the loss on.
    after = tokens * d * (2 * size + 2 * FP32) + FP32 * vocabulary * d / mesh.tp
    logits = size * min(LOGITS_AT_ONCE, tokens * vocabulary / mesh.tp)
    passing = tokens * (max(0.0, most - own) + size * (found.passing / mesh.tp + 2 * d))
    own_rows = config.batch_rows // mesh.data_size
    copies = _copies(config, mesh, size)
    return Memory(held, copies, kept / mesh.tp, after + max(logits, passing), own_rows > rows, stepping_bytes(config))


def stepping_bytes(config: RunConfig) -> float:
    """What the optimizer's step takes for a moment."""
    if config.optim.name != "muon":
        return 0.0
    dims, d = config.model.dims, config.model.d_model
    largest = d * max(*dims.segments.values(), dims.d_inner)  # of the matrices
    return MUON_BYTES * min(max(MUON_AT_ONCE, largest), 3 * config.model.num_layers * largest)


def _copies(config: RunConfig, mesh: Mesh, size: int) -> float:
    """Of weights: autocast narrows those of matrix products; FSDP2 gathers those of a few blocks, and of the head."""
    model, parallel = config.model, config.parallel
    dims, head = model.dims, model.padded_vocab_size * model.d_model
    projections, others = model.d_model * (sum(dims.segments.values()) + dims.d_inner), dims.other_products()
    if parallel.shard in ("full", "hybrid") and (mesh.shard * mesh.cp > 1 or parallel.offload):
        blocks = 2 + parallel.prefetch if parallel.reshard else model.num_layers
        return (size * min(blocks, model.num_layers) * (projections + others) + (FP32 + size) * head) / mesh.tp
    narrowed = others if config.train.precision == "fp8" else projections + others
    return size * (model.num_layers * narrowed + head) / mesh.tp if size < FP32 else 0.0


def _numbers(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
