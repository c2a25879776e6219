"""Triton's CPU interpreter, made right for bfloat16 and FP8.

As it comes (3.6 and 3.8) it computes bfloat16 on the raw 16-bit integers and truncates casts to it and to FP8, and a
row of a product has other bits in another batch.
`test_interpreter.py` notices when a new Triton moves what is replaced here.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from deepinfer_plugin.kernels.row_gemm import batch_gemm

DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
RAW = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32), 8: (np.int64, torch.int64)}
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
INSTRUCTION = 16  # channels that a GPU adds at once
COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)

_convert_float = interpreter._convert_float
_binary_op = interpreter.InterpreterBuilder.binary_op


def convert(x, source, target, rounding_mode):
    """fp -> fp through torch. x: the interpreter's array, of raw bits where numpy has no such type."""
    from_dtype, to_dtype = DTYPES.get(str(source)), DTYPES.get(str(target))
    if from_dtype is None or to_dtype is None or rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
        return _convert_float(x, source, target, rounding_mode)
    raw = np.ascontiguousarray(x).view(RAW[from_dtype.itemsize][0])
    bits = torch.from_numpy(raw).view(from_dtype).to(to_dtype).contiguous().view(RAW[to_dtype.itemsize][1])
    return bits.numpy().view(interpreter._get_np_dtype(target)).reshape(np.shape(x))


def is_bfloat16(handle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def widened(handle):
    return convert(handle.data, tl.bfloat16, tl.float32, None) if is_bfloat16(handle) else handle.data


def binary_op(self, left, right, op):
    if op in BITWISE or not (is_bfloat16(left) or is_bfloat16(right)):
        return _binary_op(self, left, right, op)
    result = op(widened(left), widened(right))
    if op in COMPARISONS:
        return interpreter.TensorHandle(result, tl.int1)
    return interpreter.TensorHandle(convert(result.astype(np.float32), tl.float32, tl.bfloat16, None), tl.bfloat16)


def create_dot(self, a, b, d, *options):
    """A product whose rows do not see each other and whose sums do not depend on its depth, as on a GPU."""
    x, y = (torch.from_numpy(np.ascontiguousarray(widened(t), dtype=np.float32)) for t in (a, b))
    total = d.data
    for left, right in zip(x.split(INSTRUCTION, 1), y.split(INSTRUCTION), strict=True):
        total = total + batch_gemm(left.contiguous().unsqueeze(0), right.unsqueeze(0)).squeeze(0).numpy()
    return interpreter.TensorHandle(total, d.dtype.scalar)


def repair() -> None:
    """Replace the interpreter's casts, its products, and its arithmetic on bfloat16."""
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.binary_op, interpreter.InterpreterBuilder.create_dot = binary_op, create_dot
