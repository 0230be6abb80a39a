"""What bench/cache.py measures: the cache's bookkeeping, beside vLLM's own, on traces and recorded operations."""
