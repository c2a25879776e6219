"""DeepSeek-V4.1-Flash for an existing vLLM. `register` is all that vLLM calls; nothing is imported before it runs."""


def register() -> None:
    """Entry point of group `vllm.general_plugins`: runs in every process of vLLM, and may run again."""
    from deepinfer_plugin.install import install

    install()
