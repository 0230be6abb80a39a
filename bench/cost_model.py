"""How far is the cost model off, and is its floor a floor?

    python bench/cost_model.py [--data ../shared/data/measured_decode_attention.csv]
                               [--output bench/results/cost-model.json]

The data are decode-attention latencies of three engines' kernels on two GPUs, measured by others (see "data" in the
results; the rows themselves are not part of this project). For each shape the fastest of them is held against the
model's floor, the time that the device needs at least (the roofline), and against its prediction for the best of a
handful of this project's own variants. A source whose rates exceed what the device's memory can give is set aside
whole: its rows are not what they are labelled as. Coefficients (a ridge on the shares of the prediction's parts) are
judged on head geometries that they did not see, and on the GPU that they were not fitted to; for this project's own
CPU kernels, on batches and on kernels of the recorded grids (bench/tuning_bench) that they did not see.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cache_bench.document import as_text
from cost_model_bench import data, own, theirs
from cpu_bench import machine

from pagegen import __version__

RESULTS = Path(__file__).parent / "results"


def rows_of(measured: list[data.Shape], dropped: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every figure about what others measured."""
    yield from theirs.floors(measured)
    for source in dropped:
        yield {"what": "a source that is set aside", **source}
    cases = theirs.cases(measured)
    yield from theirs.errors(cases)
    yield from theirs.left_out(cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=data.USUAL_PLACE, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS / "cost-model.json", help="default: %(default)s")
    options = parser.parse_args()
    started = time.perf_counter()
    measured, dropped = data.sound(data.read(options.data))
    rows = []
    for row in itertools.chain(own.errors(own.recorded()), rows_of(measured, dropped)):
        print(json.dumps(row), flush=True)
        rows.append(row)
    document = {
        "question": (__doc__ or "").partition("\n")[0],
        "method": (__doc__ or "").rpartition("\n\n")[2].strip(),
        "data": data.ORIGIN,
        "environment": {
            "date": machine.date(), "pagegen": __version__, "python": platform.python_version(),
            "scikit_learn": theirs.scikit_learn(), "system": f"{platform.system()} {platform.release()}",
        },
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(as_text(document), encoding="utf-8")
    print(f"{document['seconds']:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
