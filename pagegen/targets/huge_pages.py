"""Memory in huge pages (2 MiB) for what kernels stream: key-value caches, and buffers that measure the memory."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20


def huge_memory(size: int) -> Tensor:
    """uint8 [size], zero, aligned to 2 MiB and in huge pages where the system gives them (Linux, unless transparent
    huge pages are off). Memory is taken page by page when it is first written, near the thread that writes.

    With pages of 4 KiB an address translation is missed every 4 KiB, at every row of a strewn read: decode over a cache
    of 4 KiB pages has 0.74 (HND) to 0.87 (NHD) of the speed, `write_kv` of a decode step 0.6 (Zen 4, 8 x 4096 tokens).
    """
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    whole = -(-size // HUGE_PAGE) * HUGE_PAGE
    # private: shared anonymous memory (the default) gets no huge pages
    try:
        area = mmap.mmap(-1, whole + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes of memory were asked for: {error}") from error
    with contextlib.suppress(OSError):  # a system built without huge pages: what it gives then is right as well
        area.madvise(mmap.MADV_HUGEPAGE)
    start = torch.frombuffer(area, dtype=torch.uint8, count=1).data_ptr()
    return torch.frombuffer(area, dtype=torch.uint8, count=size, offset=-start % HUGE_PAGE)
