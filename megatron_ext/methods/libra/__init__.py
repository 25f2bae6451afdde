"""Libra: replicas from a prediction of the load to come, and own tokens first."""
