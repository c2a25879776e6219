"""Launching Triton kernels in a chain: the next one gets ready while the last one ends.

From SM90 on a kernel may start before the one in front of it has finished (programmatic dependent launch), if it waits
before it touches what others write. So every kernel is launched with `chained()` and begins with `follow()`, in every
program, early exits included: only then does the end of one kernel mean that all before it have ended. Weights, which
no kernel writes, may be read before. Elsewhere both do nothing.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer_plugin.kernels import target

FIRST_CAPABILITY = 90


def chained() -> dict[str, Any]:
    """Keywords of a launch."""
    return {"launch_pdl": True} if _chains() else {}


def _chains() -> bool:
    return target.compute_capability() >= FIRST_CAPABILITY


_chains.__triton_builtin__ = True  # type: ignore[attr-defined] # plain Python, called while a kernel is compiled


@triton.constexpr_function
def _is_chained():
    return _chains()


@triton.jit
def follow():
    """Let the next kernel get ready, and wait for everything that the kernels before have written."""
    if _is_chained():
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch_ahead(pointers):
    """Bring the cache lines of weights at `pointers` into the second-level cache; to be called before `follow`."""
    if _is_chained():
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
