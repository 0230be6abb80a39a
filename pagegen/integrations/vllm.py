"""vLLM on paged attention: a backend that vLLM finds by itself where pagegen is installed.

vllm serve MODEL --attention-backend PAGEGEN

Importing this module does not import vLLM; `pagegen.integrations.vllm_backend`, which vLLM imports once the backend is
selected, holds the classes that inherit from vLLM's. See docs/engines.md.
"""

from __future__ import annotations

import logging

from pagegen import settings
from pagegen.integrations.engine_layer import version_of

NAME = "PAGEGEN"
BACKEND = "pagegen.integrations.vllm_backend.PagegenBackend"
SUPPORTED = ((0, 32), (0, 34))  # from, below

log = logging.getLogger(__name__)


def register() -> None:
    """Adds the backend PAGEGEN to vLLM's, and puts it in the place of those that `PAGEGEN_VLLM_REPLACE` names (such as
    CPU_ATTN: vLLM's CPU platform takes no other by choice).

    vLLM calls this in each of its processes, by the entry point group `vllm.general_plugins`. An engine that selects
    another backend must start whatever is installed beside it, so a vLLM that is not supported is refused only when
    the backend is selected, or said in one line where it has no place to register at. Raises ValueError for a name in
    `PAGEGEN_VLLM_REPLACE` that vLLM has no backend for.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        log.warning("the attention backend %s is not registered: %s", NAME, fault() or error)
        return
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, BACKEND)
    for name in settings.vllm_replaced():
        if name not in AttentionBackendEnum.__members__:
            known = ", ".join(AttentionBackendEnum.__members__)
            raise ValueError(f"PAGEGEN_VLLM_REPLACE must name attention backends of vLLM ({known}), got {name}")
        register_backend(AttentionBackendEnum[name], BACKEND)


def fault() -> str | None:
    """Why the installed vLLM cannot be served, in one line, or None."""
    lowest, limit = (".".join(map(str, bound)) for bound in SUPPORTED)
    try:
        import vllm
    except ImportError:
        return f"vLLM is not installed: pip install 'vllm>={lowest},<{limit}'"
    found = str(getattr(vllm, "__version__", "of unknown version"))
    if SUPPORTED[0] <= version_of(found)[:2] < SUPPORTED[1]:
        return None
    return f"vLLM {found} is not supported: install vllm>={lowest},<{limit}"
