"""The other attention implementations that bench/cpu.py measures, one module and one process each.

A module has `version()`, which raises ImportError where the peer is not installed, and `prepare(cell, sets, given)`,
which lays the keys and values of `sets` batches out as the peer wants them and returns a `Prepared`; it raises
`Unsupported` for a cell that the peer cannot do. Packages lie in one folder a peer (`make bench-peers`), found by
the worker process alone; all share this interpreter and its torch, and so one OpenMP runtime.
"""
