"""Launching Triton kernels in a chain: the next one gets ready while the last one ends.

From SM90 on a kernel may start before the one in front of it has finished (programmatic dependent launch), if it waits
before it touches what others write. So every kernel is launched with `chained()` and begins with `follow()`, in every
program, early exits included: only then does the end of one kernel mean that all before it have ended. Weights, which
no kernel writes, may be read before. Elsewhere both do nothing.

The next kernel's programs start wherever there is room. While a large kernel runs there is room on few processors,
where all of them would gather; so a large one lets the next start only when its programs end, or call `release`.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer_plugin.kernels import target

FIRST_CAPABILITY = 90
FEW_PROGRAMS: tl.constexpr = tl.constexpr(132)  # one a processor: they leave room everywhere


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
    """Let the next kernel get ready if this one is small, and wait for all that the kernels before have written."""
    if _is_chained():
        if tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) <= FEW_PROGRAMS:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def release():
    """Let the next kernel get ready: to be called where a program of a large kernel has little left to do."""
    if _is_chained():
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(pointers):
    """Bring the cache lines of weights at `pointers` into the second-level cache; to be called before `follow`."""
    if _is_chained():
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
