"""`python -m benchmarks [--quick | --full] [op ...]` times the operators beside their peers and the machine's limits.

Every result is verified against float64 before it is timed.
"""
