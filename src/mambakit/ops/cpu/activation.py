"""silu, alone and as a gate, forward and backward.

An array is passed once, never twice under two names: where two arguments overlap, LLVM's loop is not vectorized.
"""

from __future__ import annotations

from typing import Any

from .jit import kernel, sigmoid


@kernel
def silu(values: Any) -> None:
    """values = silu(values)."""
    for i in range(values.size):
        values[i] = values[i] * sigmoid(values[i])


@kernel
def silu_backward(values: Any, dout: Any) -> None:
    """values, the input of silu, becomes its gradient."""
    for i in range(values.size):
        s = sigmoid(values[i])
        gated = values[i] * s
        values[i] = dout[i] * (s + gated - gated * s)


@kernel
def gate(values: Any, gates: Any) -> None:
    """values *= silu(gates)."""
    for i in range(values.size):
        values[i] = values[i] * gates[i] * sigmoid(gates[i])


@kernel
def gate_backward(values: Any, gates: Any, grad: Any, dgates: Any) -> None:
    """grad enters as the gradient of values silu(gates) and leaves as that of values."""
    for i in range(values.size):
        s = sigmoid(gates[i])
        gated = gates[i] * s
        dgates[i] = grad[i] * values[i] * (s + gated - gated * s)
        grad[i] = grad[i] * gated
