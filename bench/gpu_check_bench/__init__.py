"""What bench/gpu_check.py runs: a supervisor that needs only the standard library, and the parts in worker processes."""
