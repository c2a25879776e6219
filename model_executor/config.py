"""Every option of ours: `--additional-config '{"deepinfer": {...}}'`. Read once per process, passed on as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from vllm.config import VllmConfig

SECTION = "deepinfer"
VERIFICATIONS = ("coupled", "ratio")


@dataclass(frozen=True)
class DeepInferConfig:
    """The options, with V4.1's trained behaviour as their defaults.

    activation_rounding: round the inputs of FP8 and FP4 products to FP8, as in training. Off: other text than V4.1's.
    kv_rounding: round local keys to FP8, compressed entries and index keys to FP4, as in training. Off: other text.
    packed_weights: keep FP8 and FP4 weights in the checkpoint's bytes, decoded whenever they are used; same text. Off:
        decoded once, to fp32. None: off on CPU, where decoding takes longer than multiplying, on elsewhere.
    packed_kv: keep local keys in FP8, compressed entries and index keys in FP4 records; same text. Off: the rounded
        values in the model's dtype. None: as packed_weights, and off without kv_rounding.
    scheduled_verification: verify as many drafts as pay, by their confidences; same text. Off: all drafts, every round.
    verification: "coupled" counts a draft if it is the target's own choice; "ratio" by the ratio of its probabilities,
        which accepts a little more, with the same distribution but another text under every schedule.
    force_kernels: op -> module that runs it whatever the hardware, {"rms_norm": "reference"} say. Empty: tables decide.
    """

    activation_rounding: bool = True
    kv_rounding: bool = True
    packed_weights: bool | None = None
    packed_kv: bool | None = None
    scheduled_verification: bool = True
    verification: str = "coupled"
    force_kernels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("activation_rounding", "kv_rounding", "scheduled_verification"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{SECTION}.{name}: must be true or false, got {value!r}")
        for name in ("packed_weights", "packed_kv"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{SECTION}.{name}: must be true, false or null, got {value!r}")
        if self.packed_kv and not self.kv_rounding:
            raise ValueError(f"{SECTION}.packed_kv: records hold rounded rows only, so kv_rounding must be true")
        if self.verification not in VERIFICATIONS:
            raise ValueError(f"{SECTION}.verification: must be one of {VERIFICATIONS}, got {self.verification!r}")
        forced = self.force_kernels
        if not isinstance(forced, Mapping) or not all(isinstance(s, str) for pair in forced.items() for s in pair):
            raise ValueError(f"{SECTION}.force_kernels: must map op names to module names, got {forced!r}")

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> "DeepInferConfig":
        return cls.from_additional_config(vllm_config.additional_config)

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "DeepInferConfig":
        """Our section of vLLM's `additional_config`.

        Raises:
            ValueError: the section or an option is misspelt, or a value has the wrong type.
        """
        if not isinstance(additional_config, Mapping):
            return cls()
        for key in additional_config:
            if key != SECTION and get_close_matches(str(key).lower(), [SECTION], cutoff=0.8):
                raise ValueError(f"additional_config: our options stand under {SECTION!r}, got the key {key!r}")
        options = additional_config.get(SECTION, {})
        if not isinstance(options, Mapping):
            raise ValueError(f"additional_config.{SECTION}: must be a mapping of options, got {options!r}")
        known = [option.name for option in fields(cls)]
        for key in options:
            if key not in known:
                close = get_close_matches(str(key), known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ValueError(
                    f"additional_config.{SECTION}: unknown option {key!r}; {hint}known: {', '.join(known)}"
                )
        return cls(**options)

    @property
    def deviations(self) -> list[str]:
        """The options with which the text is not the trained model's."""
        return [name for name in ("activation_rounding", "kv_rounding") if not getattr(self, name)]
