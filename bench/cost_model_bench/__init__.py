"""The parts of bench/cost_model.py."""
