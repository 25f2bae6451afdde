"""The program behind `megatron-ext train`."""
