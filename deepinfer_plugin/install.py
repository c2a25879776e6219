"""What `register()` does, in order. Runs in every process of vLLM, and may run again."""

from deepinfer_plugin.model_executor.vllm_compat import check_version

ARCH = "DeepseekV41ForCausalLM"
MODULE = "deepinfer_plugin.model_executor.models.deepseek_v41"
MODEL_CLASS = f"{MODULE}.{ARCH}"
DRAFT_ARCH = "DSparkV41DraftModel"
DRAFT_MODULE = "deepinfer_plugin.spec_decode.dspark.draft_model"

_announced = False


def install() -> None:
    """Put our V4.1 in the place of vLLM's.

    Raises:
        RuntimeError: this vLLM is not supported.
    """
    vllm_version = check_version()  # before any import of vLLM that may have moved

    from vllm.logger import init_logger
    from vllm.model_executor.models import ModelRegistry

    from deepinfer_plugin import config_hook, patches
    from deepinfer_plugin.model_executor.quantization import register_quantization

    ModelRegistry.register_model(ARCH, f"{MODULE}:{ARCH}")
    ModelRegistry.register_model(DRAFT_ARCH, f"{DRAFT_MODULE}:{DRAFT_ARCH}")
    register_quantization()
    config_hook.install()
    patches.apply("any")

    global _announced
    if not _announced:
        _announced = True
        logger = init_logger(f"vllm.{__name__}")
        logger.info("deepinfer-plugin on vLLM %s: %s is served by %s", vllm_version, ARCH, MODEL_CLASS)
