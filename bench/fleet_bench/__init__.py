"""The parts of bench/fleet.py."""
