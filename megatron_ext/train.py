"""`torchrun -m megatron_ext.train`: what `megatron-ext train` does, as one rank of a launch."""

from megatron_ext.trainer.train import main

if __name__ == "__main__":
    main()
