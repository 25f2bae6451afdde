"""LLEP: overload spills to the least loaded ranks."""
