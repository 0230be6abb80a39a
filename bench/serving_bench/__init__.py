"""What bench/serving.py measures: a server with a real model, under two traces' requests at their own times."""
