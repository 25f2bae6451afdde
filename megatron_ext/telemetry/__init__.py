"""Records loads and choices of MoE layers, and each rank's position, for any training program."""
