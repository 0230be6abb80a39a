"""What `bench/tuning.py` is made of: recorded cases, their recording, and the search replayed on them."""
