"""The operators: tensors in, tensors out, the same call on every device.

Sizes: B batch, L length, D channels, H heads, P head size, G groups, N state, W convolution width. Channel-last
everywhere. `doc_ids` (int32, (B, L), non-decreasing) says which document a token belongs to: where it changes, state
and convolution restart from zero.
"""

from .causal_conv1d import causal_conv1d, causal_conv1d_split, causal_conv1d_step
from .conv_ssd_norm import conv_ssd_norm
from .cross_entropy import linear_cross_entropy
from .dispatch import backend
from .embedding import embedding
from .fp8_linear import fp8_linear
from .norm import normalized, rms_norm
from .selective_scan import selective_scan, selective_scan_split, selective_scan_step
from .ssd import ssd, ssd_step

__all__ = [
    "backend",
    "causal_conv1d",
    "causal_conv1d_split",
    "causal_conv1d_step",
    "conv_ssd_norm",
    "embedding",
    "fp8_linear",
    "linear_cross_entropy",
    "normalized",
    "rms_norm",
    "selective_scan",
    "selective_scan_split",
    "selective_scan_step",
    "ssd",
    "ssd_step",
]
