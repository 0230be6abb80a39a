"""SGLang on paged attention: a backend that SGLang finds by itself where pagegen is installed.

python -m sglang.launch_server --model-path MODEL --attention-backend pagegen

Importing this module does not import SGLang; `pagegen.integrations.sglang_backend`, imported once the backend is
selected, holds the class that inherits from SGLang's. See docs/engines.md.
"""

from __future__ import annotations

import logging
from typing import Any

from pagegen.integrations.engine_layer import version_of

NAME = "pagegen"
SUPPORTED = ((0, 5, 23), (0, 5, 24))  # from, below

log = logging.getLogger(__name__)


def register() -> None:
    """Adds the backend "pagegen" to SGLang's and to what `--attention-backend` accepts.

    SGLang calls this in each of its processes, by the entry point group `sglang.srt.plugins`. A server that selects
    another backend must start whatever is installed beside it, so an SGLang that is not supported is refused only when
    the backend is selected, or said in one line where it has no place to register at.
    """
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        log.warning("the attention backend %s is not registered: %s", NAME, fault() or error)
        return
    register_attention_backend(NAME)(create)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def create(model_runner: Any) -> Any:
    """The backend of an SGLang model runner. Raises ImportError, in one line, for an SGLang that is not supported, and
    NotImplementedError for a runner that asks for what the backend lacks."""
    from pagegen.integrations.sglang_backend import PagegenAttnBackend

    return PagegenAttnBackend(model_runner)


def fault() -> str | None:
    """Why the installed SGLang cannot be served, in one line, or None."""
    lowest, limit = (".".join(map(str, bound)) for bound in SUPPORTED)
    try:
        import sglang
    except ImportError:
        return f"SGLang is not installed: pip install 'sglang>={lowest},<{limit}'"
    found = str(getattr(sglang, "__version__", "of unknown version"))
    if SUPPORTED[0] <= version_of(found) < SUPPORTED[1]:
        return None
    return f"SGLang {found} is not supported: install sglang>={lowest},<{limit}"
