"""The arrays of the cache's bookkeeping, by what their elements are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]  # of blocks, of nodes
Ints = npt.NDArray[np.int64]  # lengths, positions, slots
Packed = npt.NDArray[np.uint32]  # tokens
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
