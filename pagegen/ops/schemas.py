"""The operators' schemas, with torch alone: importing this module registers `torch.ops.pagegen.*`.

`Library.define` and not `custom_op`: the latter costs ten times the host time a call (28 against 2.4 us).
Sizes are SymInt, so that a new value compiles nothing; caches are declared mutated, so that Inductor writes
in place; strides are kept, since kernels read them.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("pagegen", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_ATTENTION = (
    "Tensor q, Tensor k_cache, Tensor? v_cache, Tensor block_table, Tensor seq_lens, *, "
    "Tensor? query_start_loc=None, SymInt? max_query_len=None, SymInt? max_seq_len=None, float? scale=None, "
    "bool causal=True, int? window=None, float? logit_softcap=None, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_zero=None, Tensor? v_zero=None, "
    "Tensor? tree_mask=None, str? score_mod=None, str? mask_mod=None, Tensor[]? captures=None, "
    "str? kv_dtype=None, int? v_head_dim=None, bool batch_invariant=False, bool return_lse=False, str? variant=None"
)
_QUANTISED = "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_zero=None, Tensor? v_zero=None, str? kv_dtype=None"

for schema in (
    f"paged_attention({_ATTENTION}) -> (Tensor, Tensor)",
    f"paged_attention.out({_ATTENTION}, Tensor(a!) out) -> Tensor",
    "write_kv(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor slot_mapping, *, "
    f"{_QUANTISED}) -> ()",
    "rope_write_kv(Tensor q, Tensor k, Tensor? v, Tensor positions, Tensor cos, Tensor sin, "
    "Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor slot_mapping, *, bool interleaved=False, "
    f"{_QUANTISED}) -> Tensor",
    "update_scales(Tensor k, Tensor? v, Tensor slot_mapping, Tensor(a!) k_scale, Tensor(b!)? v_scale, *, "
    "Tensor(c!)? k_zero=None, Tensor(d!)? v_zero=None, str kv_dtype) -> ()",
    "copy_blocks(Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor pairs) -> ()",
    "merge_states(Tensor outs, Tensor lses) -> (Tensor, Tensor)",
    "merge_states.list(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)",
    "merge_into(Tensor(a!) out, Tensor(b!) lse, Tensor other_out, Tensor other_lse, Tensor? rows) -> ()",
):
    LIBRARY.define(schema, tags=TAGS)
