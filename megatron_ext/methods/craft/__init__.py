"""CRAFT: replicas placed before the run, by what each layer gains."""
