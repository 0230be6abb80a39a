"""What bench/database.py measures: a tuning database of made-up trials, how it takes them in and how it answers."""
