"""LPLB: a linear program splits each load over replicas placed from history."""
