"""Which vLLM we run in, and the names that moved between its versions. The only file with a version in it.

Importing it imports nothing of vLLM but its version, so that a refusal comes before anything that may have moved.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

SUPPORTED = SpecifierSet(">=0.32,<0.34")

# The one environment variable of ours: the check runs when vLLM loads its plugins, before any configuration exists.
OVERRIDE = "DEEPINFER_ALLOW_UNSUPPORTED_VLLM"


def vllm_version() -> str:
    """The version of the vLLM that this process would import.

    Raises:
        PackageNotFoundError: there is none.
    """
    try:
        from vllm.version import __version__
    except ModuleNotFoundError as error:
        raise PackageNotFoundError("vllm") from error
    return __version__


def is_supported(version: str) -> bool:
    try:
        return SUPPORTED.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def is_overridden() -> bool:
    return os.environ.get(OVERRIDE) == "1"


def check_version() -> str:
    """Return vLLM's version if we may run in it.

    Raises:
        RuntimeError: it is outside the supported range, and the user has not asked to try nevertheless.
    """
    version = vllm_version()
    if not is_supported(version) and not is_overridden():
        raise RuntimeError(
            f"deepinfer-plugin: vLLM must be {SUPPORTED}, found {version}. Install a supported vLLM, leave this plugin "
            f"out with VLLM_PLUGINS, or set {OVERRIDE}=1 to try it untested."
        )
    return version


def get_kv_cache_groups(vllm_config: Any, specs: Mapping[str, Any]) -> list[Any]:
    """vLLM's split of cache layers into groups. The first place can go when 0.32 is no longer supported."""
    old, new = "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"
    module = import_module(new if Version(vllm_version()) >= Version("0.33") else old)
    return module.get_kv_cache_groups(vllm_config, dict(specs))
