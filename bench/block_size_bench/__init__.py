"""Parts of bench/block_size.py."""
