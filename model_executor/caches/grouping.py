"""Which caches share a block table: groups of caches whose blocks together are about as large as the widest group's.

A block has the same number of bytes in every group. Only the compressed caches grow with the request, so their group
says how large a block is; sliding caches, of which a request keeps a few blocks each, are put together to fill it.
"""

from collections import defaultdict
from collections.abc import Mapping

from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, SlidingWindowMLASpec, UniformTypeKVCacheSpecs


def group_caches(specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Every cache in one group, layer names in the order of `specs`."""
    sliding: dict[SlidingWindowMLASpec, list[str]] = defaultdict(list)
    growing = {}
    for name, spec in specs.items():
        if isinstance(spec, SlidingWindowMLASpec):
            sliding[spec].append(name)
        else:
            growing[name] = spec
    together = UniformTypeKVCacheSpecs.from_specs(growing)
    if together is None:
        raise ValueError(f"caches: those that grow with a request must be of one kind, got {growing}")
    groups, widest = [KVCacheGroupSpec(list(growing), together)], together.page_size_bytes
    most, _ = max(sliding.items(), key=lambda item: len(item[1]))
    width = max(widest, max(1, round(widest / most.page_size_bytes)) * most.page_size_bytes)
    for spec, names in sliding.items():
        size = max(1, width // spec.page_size_bytes)
        groups += [KVCacheGroupSpec(names[n : n + size], spec) for n in range(0, len(names), size)]
    return groups
