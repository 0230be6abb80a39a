"""transformers' continuous batching on paged attention, as one of the flash-attention implementations that it takes.

name = register()
model.set_attn_implementation(name)
model.generate_batch(inputs=prompts, ...)
"""

from __future__ import annotations

import functools
from typing import Any

from pagegen.integrations import flash_attn_compat
from pagegen.integrations.transformers import check_version

# transformers takes a name with "flash" for an implementation of flash-attention, and one with "flash" before a 2 for
# one with block tables
NAME = "flash_pagegen_2"


@functools.cache
def register() -> str:
    """Registers `pagegen.integrations.flash_attn_compat` with transformers, once a process, and returns the name for
    `model.set_attn_implementation`. Raises ImportError for a transformers that is missing or not supported.

    transformers has no public way to register flash-attention functions that are not a package of their own; this
    wraps the private one that it finds them by, which is there in all supported versions."""
    check_version()
    import transformers.modeling_flash_attention_utils as flash
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, flash_attention_forward)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    others = flash._lazy_imports

    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation != NAME:
            return others(implementation, *args, **kwargs)
        functions = (
            flash_attn_compat.flash_attn_func,
            flash_attn_compat.flash_attn_varlen_func,
            flash_attn_compat.flash_attn_with_kvcache,
        )
        return (*functions, flash._pad_input, flash._unpad_input)

    flash._lazy_imports = lazy_imports
    return NAME
