"""EPLB: replicas from load history."""
