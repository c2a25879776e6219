"""Compile Triton kernels for GPUs that are not there, from the launches that the ops themselves make."""

import inspect
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OPCODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)", re.M)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")


@dataclass(frozen=True)
class Launch:
    """What one launch asks of the compiler; equal launches compile to the same code."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]  # arguments that are multiples of 16
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def compile(self, capability: int) -> Any:
        source = ASTSource(
            fn=self.kernel,
            signature=dict(self.signature),
            constexprs=dict(self.constants),
            attrs={(i,): [["tt.divisibility", 16]] for i in self.aligned},
        )
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(self.options))


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record what kernels are launched with; nothing is computed."""
    launches: list[Launch] = []
    run = triton.JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append(_launch(self, args, keywords))

    triton.JITFunction.run = record
    try:
        yield launches
    finally:
        triton.JITFunction.run = run


def _launch(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Launch:
    options = tuple((name, keywords.pop(name)) for name in OPTIONS if name in keywords)
    bound = inspect.signature(kernel.fn).bind(*args, **keywords).arguments
    signature, constants, aligned = [], [], []
    for i, (parameter, value) in enumerate(zip(kernel.params, bound.values(), strict=True)):
        kind = "constexpr" if parameter.is_constexpr else _kind(value)
        signature.append((parameter.name, kind))
        if kind == "constexpr":
            constants.append((parameter.name, value))
        elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            aligned.append(i)
    return Launch(kernel, tuple(signature), tuple(constants), tuple(aligned), options)


def _kind(value: Any) -> str:
    """As Triton specialises at run time: 1 and None become constants."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def opcodes(compiled: Any, folder: Path) -> Counter[str]:
    """How often each machine instruction stands in the code."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    text = subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout
    found = Counter(OPCODE.findall(text))
    assert found, "the disassembler does not know this architecture"
    return found


def stack_bytes(compiled: Any, folder: Path) -> int:
    """Spilled bytes a thread."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    command = [TOOLS / "cuobjdump", "--dump-resource-usage", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", text)
    assert found, text
    return int(found.group(1))


def launches_of(op: Callable[[], Any]) -> list[Launch]:
    """The different launches that `op` makes."""
    with recorded_launches() as launches:
        op()
    return list(dict.fromkeys(launches))
