"""What is known of kernels without a run: what a compiler made of them, and what a model expects of them."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from pagegen.db import codec
from pagegen.db.order import by_code_point
from pagegen.db.queries import Decoder, joined, of_parents
from pagegen.db.schema import compile_facts, predictions
from pagegen.spec import CompileFacts, Prediction
from pagegen.spec.result import COMPILE_COUNTS

FACTS = (
    sa.select(compile_facts, *of_parents(compile_facts, "data"))
    .select_from(joined(compile_facts))
    .order_by(by_code_point(compile_facts.c.created_at), compile_facts.c.digest)
)
PREDICTIONS = (
    sa.select(predictions, *of_parents(predictions, "data"))
    .select_from(joined(predictions))
    .order_by(by_code_point(predictions.c.created_at), predictions.c.digest)
)


def facts_of(row: Any, decoder: Decoder) -> CompileFacts:
    """The facts of a row of `FACTS`. Raises one of UNDECODABLE."""
    spec, layout, target, code_hash = decoder.once(codec.kernel_from, row.kernel)
    return CompileFacts(
        spec=spec,
        layout=layout,
        target=target,
        code_hash=code_hash,
        variant=decoder.once(codec.variant_from, row.variant),
        environment=dict(decoder.once(codec.environment_from, row.environment)),
        form=row.form,
        loop=json.loads(row.loop),
        created_at=row.created_at,
        **{name: getattr(row, name) for name in COMPILE_COUNTS},
    )


def prediction_of(row: Any, decoder: Decoder) -> Prediction:
    """The prediction of a row of `PREDICTIONS`. Raises one of UNDECODABLE."""
    spec, layout, _, code_hash = decoder.once(codec.kernel_from, row.kernel)
    return Prediction(
        spec=spec,
        layout=layout,
        code_hash=code_hash,
        device=decoder.once(codec.device_from, row.device),
        variant=decoder.once(codec.variant_from, row.variant),
        workload=decoder.once(codec.workload_from, row.workload),
        predicted_us=row.predicted_us,
        model=row.model,
        created_at=row.created_at,
    )
