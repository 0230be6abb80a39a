"""One attention step as a graph: states of its data, and the work that leads from one to the next.

    projected --rotate--> rotated --write--> written                    q, k, v of this step; then in the cache
    projected --rotate and write--> written                             one pass
    written --attend--> attended                                        one pass over the keys; or equal shares of them
    written --attend in splits--> partials --reduce--> attended         or reduced by the last program to finish
    written --attend prefix--> prefix state --attend own--> states --merge--> attended      shared prefixes once
    written --gather--> contiguous --dense--> attended                  copied out of the blocks, torch's SDPA
    written --gather and attend densely--> attended                     what dispatch falls back to, in float32

A step costs what was measured for it where the caller has that, and what `pagegen.costs` predicts otherwise; it says
which. What a target cannot do is not in the graph. The plan is the cheapest path.
"""

from pagegen.lowering.edges import break_even_tokens, step_graph
from pagegen.lowering.graph import Graph, Measured, Path, Step, paths, plan, whole_calls

__all__ = [
    "Graph",
    "Measured",
    "Path",
    "Step",
    "break_even_tokens",
    "paths",
    "plan",
    "step_graph",
    "whole_calls",
]
