"""What bench/gpu_check.py runs: a supervisor that needs the standard library only, and the parts in processes."""
