"""The definitions of the round trips: what every other module of this folder must equal, bit by bit."""

from deepinfer_plugin.kernels.quant_formats import round_fp4_index, round_fp4_kv, round_fp8

__all__ = ["round_fp4_index", "round_fp4_kv", "round_fp8"]
