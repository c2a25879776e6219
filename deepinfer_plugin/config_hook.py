"""What V4.1 wants from vLLM's configuration: checks at the start, and defaults where the user has said nothing."""

from vllm.config import CUDAGraphMode, SpeculativeConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.platforms import current_platform
from vllm.transformers_utils import model_arch_config_convertor

from deepinfer_plugin.install import ARCH, DRAFT_ARCH, MODEL_CLASS
from deepinfer_plugin.kernels.dispatch import check_forced
from deepinfer_plugin.model_executor.config import DeepInferConfig
from deepinfer_plugin.model_executor.models.shape import MODEL_TYPE

logger = init_logger(f"vllm.{__name__}")

# Prefix hits come in whole blocks: smaller blocks hit more, and make longer block tables. 64 is half a window.
BLOCK_SIZE = 64

WORKERS = {  # vLLM's device type -> our subclass of its worker
    "cpu": "deepinfer_plugin.workers.cpu.CPUWorker",
    "cuda": "deepinfer_plugin.workers.gpu.GPUWorker",
}
PROPOSER = "deepinfer_plugin.spec_decode.runner_v1.DSparkProposer"


def owner(arch: str) -> str:
    """The class that vLLM would build for `arch`, "module.Class"; "nobody" if the architecture is unknown."""
    entry = ModelRegistry.models.get(arch)
    if entry is None:
        return "nobody"
    if hasattr(entry, "module_name"):
        return f"{entry.module_name}.{entry.class_name}"
    return f"{entry.model_cls.__module__}.{entry.model_cls.__qualname__}"


def check_owner() -> None:
    """Raises RuntimeError: another plugin has registered the architecture after us."""
    if (found := owner(ARCH)) != MODEL_CLASS:
        raise RuntimeError(
            f"deepinfer-plugin: {ARCH} must be served by {MODEL_CLASS}, but {found} was registered for it later. "
            "Choose one of the two plugins with VLLM_PLUGINS."
        )


def check_built(vllm_config: VllmConfig) -> None:
    """Raises NotImplementedError: a feature of vLLM is switched on that this model does not have."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    graphs = vllm_config.compilation_config.cudagraph_mode
    cache_dtype = vllm_config.cache_config.cache_dtype
    methods = ("ngram", "dspark")
    refusals = {
        f"speculative decoding with method {speculative and speculative.method}, only {', '.join(methods)}": (
            speculative is not None and speculative.method not in methods and not is_ours(speculative)
        ),
        f"a KV cache of dtype {cache_dtype}, only auto": cache_dtype != "auto",
        "prompt embeddings: Engram needs token ids": vllm_config.model_config.enable_prompt_embeds,
        "LoRA": vllm_config.lora_config is not None,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "expert parallelism over data-parallel ranks": (
            parallel.data_parallel_size > 1 and parallel.enable_expert_parallel
        ),
        "dual-batch overlap": parallel.enable_dbo,
        f"piecewise CUDA graphs, got cudagraph_mode {graphs and graphs.name}, only FULL, FULL_DECODE_ONLY and NONE": (
            graphs is not None and graphs.has_piecewise_cudagraphs() and current_platform.support_static_graph_mode()
        ),
        "watermarks: tokens are chosen by noise of our own": vllm_config.watermark_config is not None,
        "use_fp64_gumbel: tokens are chosen by noise of our own": vllm_config.model_config.use_fp64_gumbel,
        **unbuilt_drafts(vllm_config),
    }
    if wanted := [feature for feature, on in refusals.items() if on]:
        raise NotImplementedError(f"{ARCH} of deepinfer-plugin does not have: {'; '.join(wanted)}")


def unbuilt_drafts(vllm_config: VllmConfig) -> dict[str, bool]:
    """Options of vLLM's DSpark that ours would not follow, and whether they are on."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "dspark":
        return {}
    ratio = DeepInferConfig.from_vllm(vllm_config).verification == "ratio"
    method, sampling = speculative.rejection_sample_method, speculative.draft_sample_method
    methods = ("standard",) if is_v1(vllm_config) else ("standard", "synthetic")
    return {
        f"DSpark with rejection_sample_method {method}, only {', '.join(methods)}": method not in methods,
        f"DSpark with draft_sample_method {sampling}, only greedy: drafts are chosen as the target chooses": (
            sampling != "greedy"
        ),
        "DSpark with use_local_argmax_reduction": speculative.use_local_argmax_reduction,
        "DSpark with dspark_draft_topk": getattr(speculative, "dspark_draft_topk", None) is not None,
        "DSpark with num_speculative_tokens_per_batch_size, see deepinfer.scheduled_verification": (
            speculative.num_speculative_tokens_per_batch_size is not None
        ),
        "deepinfer.verification ratio behind vLLM's V2 runner, only coupled": ratio and not is_v1(vllm_config),
    }


def is_v1(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's V1 runner serves, as it does on CPUs."""
    return not vllm_config.use_v2_model_runner


def is_ours(speculative: SpeculativeConfig) -> bool:
    """Whether this is V4.1's `dspark`, on the V1 runner as `draft_by_us` leaves it."""
    if speculative.method == "custom_class":
        return speculative.model == PROPOSER
    return speculative.method == "dspark" and DRAFT_ARCH in speculative.draft_model_config.architectures


def check_drafts(vllm_config: VllmConfig) -> None:
    """Raises ValueError: more drafts a round than the checkpoint's draft network makes."""
    speculative = vllm_config.speculative_config
    most = vllm_config.model_config.hf_config.dspark_block_size
    if speculative is not None and speculative.method == "dspark" and speculative.num_speculative_tokens > most:
        raise ValueError(
            f"--speculative-config: num_speculative_tokens must be at most dspark_block_size = {most} of the "
            f"checkpoint, got {speculative.num_speculative_tokens}"
        )


def draft_by_us(vllm_config: VllmConfig) -> None:
    """Ours is scheduled without vLLM's flag; its V1 runner has no `dspark`, but it takes a proposer of any class."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method == "dspark":
        if (
            speculative.enable_adaptive_verification
            and not DeepInferConfig.from_vllm(vllm_config).scheduled_verification
        ):
            raise ValueError(
                "--speculative-config: enable_adaptive_verification is true, but deepinfer.scheduled_verification of "
                "--additional-config is false; leave one of them out"
            )
        speculative.enable_adaptive_verification = False
        if speculative.rejection_sample_method == "synthetic":
            logger.warning("DSpark: rejection_sample_method is synthetic: the text is not the model's")
        if is_v1(vllm_config):
            speculative.method, speculative.model, speculative.parallel_drafting = "custom_class", PROPOSER, False


def apply_defaults(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = WORKERS.get(current_platform.device_type, parallel.worker_cls)
    cache = vllm_config.cache_config
    if not cache.user_specified_block_size:
        cache.block_size = BLOCK_SIZE
        cache.user_specified_block_size = True  # the CPU platform, which comes next, would put 128
    if cache.prefix_cache_retention_interval == 0:
        # vLLM's 0 keeps window rows for hits at the end of a prompt only; None keeps them at every block, so that
        # a prompt which shares only its first part hits too
        cache.prefix_cache_retention_interval = None
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode is None and not vllm_config.model_config.enforce_eager:
        # a step's every size lies on the device, so that one graph of the whole model serves prefill as well as decode
        compilation.cudagraph_mode = CUDAGraphMode.FULL


def hooks() -> list[str]:
    """The entries of vLLM's tables that are ours now."""
    converter = model_arch_config_convertor.MODEL_ARCH_CONFIG_CONVERTORS.get(MODEL_TYPE)
    entries = {
        f"MODELS_CONFIG_MAP[{ARCH}]: checks and defaults for V4.1": MODELS_CONFIG_MAP.get(ARCH),
        f"MODEL_ARCH_CONFIG_CONVERTORS[{MODEL_TYPE}]: no MLA flag, which would switch prefix caching off": converter,
    }
    return [what for what, entry in entries.items() if getattr(entry, "is_deepinfer", False)]


def install() -> None:
    """Wrap vLLM's entry for V4.1; again does nothing."""
    native = MODELS_CONFIG_MAP[ARCH]
    if not getattr(native, "is_deepinfer", False):

        class WithOurDefaults(native):  # type: ignore[valid-type, misc]
            is_deepinfer = True

            @staticmethod
            def verify_and_update_config(vllm_config: VllmConfig) -> None:
                native.verify_and_update_config(vllm_config)
                check_owner()
                ours = DeepInferConfig.from_vllm(vllm_config)
                check_forced(ours.force_kernels)
                check_built(vllm_config)
                check_drafts(vllm_config)
                draft_by_us(vllm_config)
                apply_defaults(vllm_config)
                for option in ours.deviations:
                    logger.warning("deepinfer.%s is off: the text is not the trained model's", option)

        MODELS_CONFIG_MAP[ARCH] = WithOurDefaults

    # A model with MLA's flag loses chunked prefill, prefix caching and its block size on CPU. Elsewhere KV connectors
    # and context parallelism read the flag.
    converters = model_arch_config_convertor.MODEL_ARCH_CONFIG_CONVERTORS
    base = converters.get(MODEL_TYPE, model_arch_config_convertor.ModelArchConfigConvertorBase)
    if current_platform.is_cpu() and not getattr(base, "is_deepinfer", False):

        class WithoutMLA(base):  # type: ignore[valid-type, misc]
            is_deepinfer = True

            def is_deepseek_mla(self) -> bool:
                return False

        converters[MODEL_TYPE] = WithoutMLA
