"""What bench/cpu.py measures, how samples are taken and weighed, and how they are shown."""
